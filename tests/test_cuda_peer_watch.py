"""What a rank sees of a failed peer when its host waits for nobody, as with NCCL: the watch, over gloo."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lanes import within

from ranks import run_ranks
from ubatch import CommGroup, GroupBroken
from ubatch.peer_watch import PeerWatch


def _watched(timeout_s: float) -> tuple[CommGroup, list[str]]:
    """A group under watch, and the aborts of its communicators. `ProcessGroup.abort` of gloo would cut it off, too."""
    group = CommGroup.from_process_group(timeout_s=timeout_s)
    aborted: list[str] = []
    connection = group.usable_connection()
    connection.pg = mock.Mock(wraps=connection.pg, abort=lambda: aborted.append(str(connection.broken)))
    connection.watch(beat_s=0.05)
    return group, aborted


def _expect_one_abort(aborted: list[str], why: str | None) -> None:
    """One, so that the device comes back. The watch aborts just after it said that the group is broken."""
    assert within(10, lambda: bool(aborted))
    assert aborted == [why]


def _reported(rank: int, ranks: int) -> None:
    """A peer that fails says so; the other learns it while its host does something else."""
    group, aborted = _watched(20.0)
    if rank == 1:
        with pytest.raises(ValueError, match="original"), group.step():
            raise ValueError("original")
    else:
        assert within(10, lambda: group.broken is not None)
        with pytest.raises(GroupBroken, match=r"rank 1 failed with ValueError: original\. Call reset\(\)"):
            group.usable_connection()
    _expect_one_abort(aborted, "rank 1 failed with ValueError: original.")
    group.reset()
    assert group.broken is None
    x = torch.ones(2)
    dist.all_reduce(x, group=group.pg)
    assert x.tolist() == [2.0, 2.0]


def _died(rank: int, ranks: int) -> None:
    """A peer that says nothing more; nobody waits for it."""
    group, aborted = _watched(1.0)
    dist.barrier()
    if rank == 1:
        os._exit(0)
    assert within(20, lambda: group.broken is not None)
    assert group.broken == "rank 1 gave no sign of life for 1.0 s."
    _expect_one_abort(aborted, group.broken)


def _healthy(rank: int, ranks: int) -> None:
    """Nobody is suspected while all beat, however long nothing else happens; and the thread ends with its group."""
    group, aborted = _watched(3.0)
    time.sleep(3.5)
    dist.barrier()
    assert group.broken is None
    connection = group.usable_connection()
    thread = connection._watch._thread  # type: ignore[union-attr]
    connection.retire()
    assert within(5, lambda: not thread.is_alive())
    _expect_one_abort(aborted, "reset() was called meanwhile.")


CASES: list[tuple[Callable[..., Any], tuple[int, ...]]] = [(_reported, ()), (_died, (1,)), (_healthy, ())]


@pytest.mark.parametrize(("case", "dying"), CASES, ids=[case.__name__.strip("_") for case, _ in CASES])
def test_watch(case: Callable[..., Any], dying: tuple[int, ...]) -> None:
    run_ranks(case, 2, dying=dying)


class _Store:
    """A store that is gone."""

    def add(self, key: str, amount: int) -> int:
        raise dist.DistNetworkError("gone")


def test_a_store_that_is_gone() -> None:
    lost: list[int] = []
    store: Any = _Store()
    watch = PeerWatch(0, (0, 1), store, 1.0, failed=lambda: False, lost=lost.append, beat_s=0.01)
    watch.start()
    assert within(5, lambda: lost == [-1])


def _alone(rank: int, ranks: int) -> None:
    connection = CommGroup.from_process_group(timeout_s=5.0).usable_connection()
    connection.watch()
    assert connection._watch is None
    assert not connection.is_stream_ordered(torch.device("cpu"))


def test_one_rank_has_nobody_to_watch() -> None:
    run_ranks(_alone, 1)
