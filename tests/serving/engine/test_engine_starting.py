"""What a rank does before it says that it is ready, for which its peers wait; and a node that joins: it waits for node
0 as long as its machine answers, and says what it waits for."""

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from children import exit_code, in_child
from engine_mains import Served, run_engine_that_connects_to_nobody, run_engine_that_finds_the_other_gone, tiny
from forked import own_server
from repository import MODELS

from ranks import free_port
from serving.engine import EngineClient, EngineCore, EngineOptions, node, run_node
from serving.engine.node import _await_node_0
from serving.engine.rank import process
from serving.engine.speculation import Algorithm, SpeculationConfig
from serving.engine.wire.rendezvous import Run
from serving.network import admit_no_more
from serving.requests import EngineDead
from serving.scheduler import SchedulerConfig
from ubatch import UBatchConfig, UBatchError
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


# -- a node that joins -------------------------------------------------------------------------------------------------


TIMEOUT_S = 0.5


def node_1(port: int) -> EngineOptions:
    return tiny(2, nnodes=2, node_rank=1, master_port=port, dbo=UBatchConfig(timeout_s=TIMEOUT_S))


def test_a_node_0_from_which_nothing_comes_back_is_named() -> None:
    """Packets are swallowed: by a network, a firewall, or a run whose nodes are complete. This took five minutes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        admit_no_more(listener)
        begun = time.monotonic()
        with pytest.raises(UBatchError, match=r"^node 0 at 127\.0\.0\.1 cannot be reached: .* \(timed out\)"):
            run_node(node_1(listener.getsockname()[1]))
        assert time.monotonic() - begun < 3 * TIMEOUT_S


def test_a_node_0_that_accepts_and_then_says_nothing_is_named() -> None:
    """Its process is stopped. This took five minutes, as connecting to the store did not count."""

    def body() -> None:  # in a child, because the thread that connects goes on
        with pytest.raises(UBatchError, match=r"cannot be reached: it has accepted a connection, and then has said"):
            run_node(node_1(listener.getsockname()[1]))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        begun = time.monotonic()
        assert exit_code(in_child(body)) == 0
        assert time.monotonic() - begun < 6 * TIMEOUT_S


@pytest.mark.long
def test_a_node_0_that_is_started_later_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "serving")
    port = free_port()
    waiting = threading.Thread(target=_await_node_0, args=(node_1(port), 60.0, Mock(number=0)), daemon=True)
    waiting.start()
    waiting.join(3 * TIMEOUT_S)
    assert waiting.is_alive(), "its machine answers"
    with socket.create_server(("127.0.0.1", port)):
        waiting.join(10)
        assert not waiting.is_alive()
    (said,) = caplog.messages
    assert said.startswith("waiting for node 0")


def test_a_node_0_that_is_never_started_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "PATIENCE", node.PATIENCE * 0)
    with pytest.raises(UBatchError, match=r"^node 0 does not listen at 127\.0\.0\.1:.*Is it running\?"):
        run_node(node_1(free_port()))


@pytest.mark.long
def test_a_node_that_is_ended_while_it_waits_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    port = free_port()
    child = in_child(lambda: run_node(node_1(port)))
    time.sleep(1.0)
    os.kill(child, signal.SIGTERM)
    assert exit_code(child) == -signal.SIGTERM
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["post_node", "claim_node"])
def test_a_node_0_that_leaves_while_a_node_joins_is_named(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run has failed, and the next one can be joined: a node that is started again ended with a traceback."""
    monkeypatch.setattr(node, "connect_store", Mock())
    monkeypatch.setattr(node, "post_node", Mock())
    monkeypatch.setattr(node, "join_run", Mock(return_value=(Mock(), node_1(0))))
    monkeypatch.setattr(node, step, Mock(side_effect=dist.DistNetworkError("Connection reset by peer")))
    with pytest.raises(UBatchError, match=r"^node 0 at 127\.0\.0\.1 has left .* \(Connection reset by peer\)"):
        node._join(Mock(), node_1(0))
