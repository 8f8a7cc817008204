"""A rank that compiles, tunes or loads for longer than `timeout_s`: its peers wait for it, but not for hung ranks."""

import itertools
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fastest_cases import FakeTimer
from interrupting import PACKAGE, interrupted_at, lines_of
from peer_failure_cases import healthy_step, lasting, promptly, wrap
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

import ubatch
import ubatch.process.job_store
from ranks import on_ranks
from ubatch import CommGroup, PeerFailed, TransferTimeout, UBatchConfig, UBatchWrapper, dbo_current_ubatch_id
from ubatch.kernels.autotuner import Autotuner
from ubatch.process.job_store import JobStore, Patience, late, late_ranks

TIMEOUT_S, LATE_S = 2.0, 3.5


@dataclass(frozen=True)
class Config:
    rows: int


class Tuned(nn.Module):
    """Sums over the ranks; the second lane (or, unsplit, the call) of a rank tunes a kernel in front of it."""

    def __init__(self, group: CommGroup, path: Path, slow: bool) -> None:
        super().__init__()
        self.group, self.slow = group, slow
        self.tuner = Autotuner(FakeTimer(), path)
        numbers = itertools.count(1)
        self.number = lambda: next(numbers)  # a function is no state of the module

    def forward(self, x: Tensor) -> Tensor:
        if dbo_current_ubatch_id() == 1 or x.shape[0] < 4:
            self.tuner.choose(f"kernel {self.number()}", (Config(1), Config(2)), self._run, device=x.device)
        return ubatch.all_reduce(x, self.group)

    def _run(self, config: Config) -> None:
        if self.slow:
            time.sleep(LATE_S / 4)


@pytest.mark.wide
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_peers_wait_for_a_rank_that_tunes(rank: int, group: CommGroup, tmp_path: Path) -> None:
    """Rank 1 tunes longer than the time-out, in a lane and outside of one; then everything has its time-out again."""
    config = UBatchConfig(group=group, dbo_prefill_token_threshold=4, timeout_s=TIMEOUT_S, verify="off")
    model = UBatchWrapper(Tuned(group, tmp_path / f"{rank}.json", slow=rank == 1), config)
    for tokens in (8, 2):
        x = torch.ones(tokens, 2)
        assert torch.equal(model(x), group.size * x)
    assert (model.statistics().engaged, late_ranks(None)) == (1, {})


@pytest.mark.slow
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_peers_wait_for_a_rank_that_warms_up(rank: int, group: CommGroup) -> None:
    """With `no_timeout`, what takes long on one rank is waited for on all: in votes, transfers, and meetings."""
    model, probe = wrap(group)
    store = c10d._get_default_store()
    for wait in (
        lambda: healthy_step(model, probe, 1, 8),
        lambda: ubatch.all_reduce(torch.ones(1), group),
        group.reset,
        lambda: CommGroup.from_process_group(timeout_s=TIMEOUT_S),
    ):
        if rank == 1:
            with model.no_timeout():
                time.sleep(LATE_S)
        wait()
    if rank == 0:
        with lasting(TIMEOUT_S), pytest.raises(TransferTimeout):
            ubatch.all_reduce(torch.ones(1), group)
        store.set("gave up", "")
    else:
        store.wait(["gave up"])
    group.reset()


@pytest.mark.wide
@on_ranks(3, dying=[2])
def test_who_is_late_is_not_taken_for_the_one_that_died(rank: int, group: CommGroup) -> None:
    """Neither answers when rank 0's transport fails, but one of them has said why."""
    if rank == 1:
        with late("compiling"):
            dist.barrier()
            time.sleep(6.0)
        return
    dist.barrier()
    if rank == 2:
        os._exit(9)
    with promptly():
        error = group.usable_connection()._connection_lost("vote", RuntimeError("closed by peer"))
    assert isinstance(error, PeerFailed)
    assert error.rank == 2
    assert "rank 2 died" in str(error)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    store = dist.HashStore()
    monkeypatch.setattr(ubatch.process.job_store, "_store", lambda: JobStore(store))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    return store


def test_blocks_in_blocks_count_once(store: dist.Store) -> None:
    with late("starting"), late("compiling"):
        assert late_ranks([0, 1]) == {1: "1 starting"}
    assert late_ranks([0, 1]) == {}
    with suppress(KeyError), late("tuning"):
        assert (late_ranks([1]), late_ranks([0])) == ({1: "2 tuning"}, {})
        raise KeyError
    assert store.add("ubatch/late", 0) == 0


def test_a_block_that_ctrl_c_ended_anywhere_does_not_last(store: dist.Store) -> None:
    def block() -> None:
        with late("compiling"):
            pass

    for number in range(lines_of(block, PACKAGE)):
        assert type(interrupted_at(number, block, PACKAGE)) is KeyboardInterrupt
        block()
        assert late_ranks([1]) == {}


def test_patience_with_one_that_hangs_in_a_compiler_ends(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with late("compiling"):
        patience = Patience(60.0, [1])
        for more, over in ((0, False), (ubatch.process.job_store.LATE_S - 1, False), (59, False), (2, True)):
            now += more
            assert patience.over() is over
    with late("compiling again"):
        patience = Patience(60.0, [1])
        now += 100
        assert not patience.over()
    for more, over in ((59, False), (2, True)):
        now += more
        assert patience.over() is over


def test_without_other_ranks_nothing_is_said() -> None:
    with late("compiling"):
        assert late_ranks(None) == {}
        patience: Any = Patience(0.0)
        time.sleep(0.01)
        assert patience.over()
