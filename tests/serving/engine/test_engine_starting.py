"""What a rank does before it says that it is ready: its peers wait for all of it."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from children import exit_code, in_child
from engine_mains import run_engine_that_connects_to_nobody, run_engine_that_finds_the_other_gone, tiny
from engine_served import Served
from forked import own_server
from repository import MODELS

from serving.engine import EngineClient
from serving.engine.options import EngineOptions
from serving.engine.rank import process
from serving.engine.rank.core import EngineCore
from serving.engine.speculation import Algorithm, SpeculationConfig
from serving.engine.wire.rendezvous import Run
from serving.requests import EngineDead
from serving.scheduler import SchedulerConfig
from ubatch.process import job_store


def test_a_rank_whose_parent_ends_while_it_starts_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for a rank that has ended, too: for five minutes, since the store is no process any more."""

    def body() -> None:
        monkeypatch.setattr(process, "_LOOK_OUT_S", 0.1)
        ours, parents = os.pipe()
        os.close(parents)  # as the system does when a process ends
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=-1, sentinel=ours))
        with process.beating(Mock(), 0):
            time.sleep(20)

    begun = time.monotonic()
    assert exit_code(in_child(body)) == 1
    assert time.monotonic() - begun < 10


async def test_a_start_that_waits_for_the_process_that_forks_ranks_can_be_given_up() -> None:
    """It waits in a thread, which nobody can cancel."""
    begun = time.monotonic()
    with own_server() as server:
        os.kill(server._process.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(EngineClient.start(tiny()), 0.5)
    assert time.monotonic() - begun < 10


def test_peers_wait_for_a_rank_that_makes_its_proposer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first step is collective: a draft network that takes long to load or capture must not come after."""
    late: dict[str, bool] = {}
    make_core = process.make_core

    def noted(*args: Any) -> EngineCore:
        late["make_core"] = bool(job_store._own.blocks)
        return make_core(*args)

    monkeypatch.setattr(process, "make_core", noted)
    speculation = SpeculationConfig(Algorithm.EAGLE, 2, 2, draft_model_path=MODELS / "tiny-moe-eagle")
    options = EngineOptions(
        MODELS / "tiny-moe",
        scheduler=SchedulerConfig(max_model_len=512),
        speculation=speculation,
        kv_cache_memory=1 << 20,
    )
    monkeypatch.setattr(gc, "freeze", lambda: late.setdefault("freeze", bool(job_store._own.blocks)))
    with process._loaded(options, 0, Run.open(dist.HashStore(), None), Mock()):
        assert late == {"make_core": True, "freeze": True}
        assert list(late)[-1] == "freeze", "the collector need not walk through the draft network, either"
        assert not job_store._own.blocks


@pytest.mark.ranks
def test_a_rank_that_ends_while_ranks_connect_is_named_and_not_the_one_that_notices() -> None:
    with pytest.raises(EngineDead, match="rank 1 died with exit status 3"):
        Served(tiny(2, expert_parallel=True), run_engine_that_finds_the_other_gone)


@pytest.mark.wide
@pytest.mark.ranks
def test_what_a_rank_that_is_killed_while_it_connects_leaves_is_removed_with_the_run() -> None:
    """Its socket lay in the system's temporary folder, where nobody removed it."""
    with pytest.raises(EngineDead, match="in the run's folder: True"):
        Served(tiny(2, expert_parallel=True), run_engine_that_connects_to_nobody)
