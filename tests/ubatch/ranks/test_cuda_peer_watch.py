"""How a rank notices a failed peer while its host does not wait, as with NCCL: the peer watch, over gloo."""

import ctypes
import os
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import deep_ep_standin
import pytest
import torch
import torch.distributed as dist
from deepep_cases import Stack, close, layer_of, rows_of, transport
from lanes import within
from peer_failure_cases import Told

from ranks import on_ranks, run_ranks
from ubatch import CommGroup, GroupBroken, UBatchConfig, UBatchWrapper
from ubatch.process.heartbeat import silence
from ubatch.process.job_store import JobStore
from ubatch.ranks.long_calls import holding_gil
from ubatch.ranks.peer_watch import PeerWatch


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


def _hold_the_gil(seconds: int) -> None:
    """As a call into C does that does not give Python's lock back."""
    ctypes.PyDLL(None).sleep(seconds)


def _silent_together(rank: int, ranks: int) -> None:
    """Both ranks hold Python's lock at the same time, as where both wait for a third; whoever is first is patient."""
    group, aborted = _watched(1.0)
    dist.barrier()
    for _ in range(2):
        with holding_gil("counts of peers", 10.0):
            _hold_the_gil(2 + rank)
        time.sleep(0.3)
    dist.barrier()
    assert group.broken is None
    assert not aborted


def _dispatches(rank: int, ranks: int) -> None:
    """DeepEP's dispatch waits with Python's lock held for longer than the time-out, in a lane and outside of one."""
    dispatch = deep_ep_standin.Buffer.dispatch

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        if rank == 1:
            _hold_the_gil(2)
        return dispatch(self, *args, **kwargs)

    with deep_ep_standin.installed(), torch.inference_mode():
        group = CommGroup.from_process_group(timeout_s=1.0)
        group.usable_connection().watch(beat_s=0.05)
        model = Stack([layer_of()], transport("deepep_high_throughput", group))
        config = UBatchConfig(verify="off", group=group, dbo_prefill_token_threshold=4, timeout_s=1.0)
        wrapper = UBatchWrapper(model, config)
        with mock.patch.object(deep_ep_standin.Buffer, "dispatch", slow):
            for tokens in (8, 3):
                x = rows_of(tokens, rank)
                close(wrapper(x), model.expected(x), f"{tokens} tokens")
        assert wrapper.statistics().engaged == 1
        assert group.broken is None
        # No rank may end before both have withdrawn what they told.
        told = group.usable_connection()._store.get
        assert within(5, lambda: {told(f"silence/{each}") for each in range(ranks)} == {"0"}), "withdrawn again"


def _died_in_a_silent_call(rank: int, ranks: int) -> None:
    """Patience is longer then, not without end."""
    group, aborted = _watched(0.5)
    dist.barrier()
    if rank == 1:
        with silence(1.5):
            os._exit(0)
    begun = time.monotonic()
    assert within(20, lambda: group.broken is not None)
    assert time.monotonic() - begun > 1.5
    assert group.broken == "rank 1 gave no sign of life for 0.5 s."
    _expect_one_abort(aborted, group.broken)


CASES: list[tuple[Callable[..., Any], tuple[int, ...]]] = [
    (_reported, ()),
    (_died, (1,)),
    (_healthy, ()),
    (_silent_together, ()),
    (_dispatches, ()),
    (_died_in_a_silent_call, (1,)),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("case", "dying"), CASES, ids=[case.__name__.strip("_") for case, _ in CASES])
def test_watch(case: Callable[..., Any], dying: tuple[int, ...]) -> None:
    run_ranks(case, 2, dying=dying)


def test_a_store_that_is_gone() -> None:
    told, store = Told(), mock.Mock(set=mock.Mock(side_effect=dist.DistNetworkError("gone")))
    PeerWatch(0, (0, 1), store, 1.0, told, 0.01).start()
    assert within(5, lambda: told.dead == [-1])


def test_a_watch_ends_with_its_connection() -> None:
    told = Told()
    watch = PeerWatch(0, (0, 1), JobStore(dist.HashStore()), 60.0, weakref.proxy(told), 0.01)
    watch.start()
    assert within(5, lambda: watch._beats > 1)
    del told
    assert within(5, lambda: not watch._thread.is_alive())


@pytest.mark.long
def test_a_watch_that_could_not_look_blames_nobody() -> None:
    """Its own process was stopped, or held Python's lock and did not say so; the peers' beats may have come or not."""
    store, told = dist.HashStore(), Told()
    store.set("beat/1", "1")
    watch = PeerWatch(0, (0, 1), JobStore(store), 0.5, told, 0.05)
    watch.start()
    assert within(5, lambda: store.add("beat/0", 0) > 2)
    _hold_the_gil(2)
    time.sleep(0.2)
    assert not told.dead
    assert within(5, lambda: told.dead == [1]), "but while it does look, it counts"


@on_ranks(1)
def test_one_rank_has_nobody_to_watch(rank: int, group: CommGroup) -> None:
    connection = group.usable_connection()
    connection.watch()
    assert connection._watch is None
    assert not connection.is_stream_ordered(torch.device("cpu"))
