"""Lifetimes of tensors, for every case in `ubatch.streams.lane_streams`; and tests of the checker itself."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from lanes import EVERY_POINT, FinishedWork
from streams_cases import Body, Lanes, compute, exchange, launch
from torch import Tensor

import ubatch
from ubatch import ConfigError, Recv, Schedule, Transfer, UBatchError, UBatchTimeout
from ubatch.dbo import dbo_current_ubatch_id, dbo_keep, dbo_switch_to_comm, dbo_switch_to_compute, dbo_yield
from ubatch.ranks import host_copy
from ubatch.ranks import transfer as transfer_module
from ubatch.ranks.host_copy import CopiedWork, copy_to_host
from ubatch.streams import lane_streams
from ubatch.streams.lane_streams import LaneStreams, Ledger
from ubatch.streams.streams import NullEvent

PEER = Schedule("peer", points_off=frozenset(), recv=Recv.PEER)


def run_and_check(lanes: Lanes, *bodies: Body) -> None:
    """A step, then work in the memory that it let go of: nothing races, and nothing was freed too early."""
    lanes.run(*bodies)
    compute()
    lanes.cuda.check()


# --------------------------------------------------------------------------------------------- allocated on compute


@pytest.mark.parametrize("schedule", [EVERY_POINT, PEER])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("hook", [True, False])
def test_waited_for_on_the_compute_stream(lanes: Lanes, schedule: Schedule, count: int, hook: bool) -> None:
    for _ in range(2):
        results = lanes.run(*[exchange(hook=hook)] * count, schedule=schedule)
        torch.cat(results)
    lanes.cuda.check()
    assert lanes.cuda.counts["comm"] == 2 * 3 * count


def test_waited_for_on_the_communication_stream(lanes: Lanes) -> None:
    """`wait` cannot join there, so the ledger keeps the buffers until the lane does."""

    def body() -> None:
        x = compute()
        dbo_switch_to_comm()
        transfer = launch(x)
        del x
        arrived = transfer.wait()
        del transfer
        dbo_yield()  # the other lane computes, in memory that `x` had if nobody kept it
        dbo_switch_to_compute()
        arrived.add(1)

    run_and_check(lanes, body, body)


def test_nobody_waits(lanes: Lanes) -> None:
    def body() -> None:
        launch(compute())
        dbo_yield()
        compute()

    run_and_check(lanes, body, body)


def test_nobody_waits_for_a_transport_with_a_stream_of_its_own(lanes: Lanes) -> None:
    cuda = lanes.cuda

    class OwnStream(FinishedWork):
        def wait(self, timeout: Any = None) -> bool:
            cuda.current().clock[cuda.nccl.name] = cuda.nccl.clock[cuda.nccl.name]
            return True

    def body() -> None:
        x = compute()
        cuda.nccl.clock.update(cuda.current().clock)
        cuda.operation("send", [x], [], cuda.nccl)
        Transfer("send", [OwnStream()], lambda: None, stream_ordered=True, keep=(x,))
        del x
        dbo_yield()
        compute()

    run_and_check(lanes, body, body)


@pytest.mark.parametrize("failing", [True, False])
def test_what_a_kernel_receives_is_left_where_a_lane_fails(lanes: Lanes, failing: bool) -> None:
    """The kernel would wait for peers that may never send. A lane that only forgot to wait receives it."""
    received: list[str] = []

    class Receives(FinishedWork):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def wait(self, timeout: Any = None) -> bool:
            received.append(self.name)
            return True

    def body() -> None:
        for name, launches in (("kernel", True), ("event", False)):
            Transfer(name, [Receives(name)], lambda: None, stream_ordered=True, wait_launches=launches)
        dbo_yield()
        if failing and dbo_current_ubatch_id() == 0:
            raise ValueError("original")
        dbo_yield()

    with pytest.raises(ValueError, match="original") if failing else nullcontext():
        lanes.run(body, body)
    assert sorted(received) == ["event"] * 2 + ["kernel"] * (0 if failing else 2)


def test_a_lane_ends_on_the_communication_stream(lanes: Lanes) -> None:
    def body() -> None:
        x = compute()
        dbo_switch_to_comm()
        x.neg_()
        dbo_keep(x)
        dbo_yield()

    run_and_check(lanes, body, body)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_lane_fails_with_a_transfer_under_way(lanes: Lanes, failing: int) -> None:
    def body() -> None:
        transfer = launch(compute())
        dbo_yield()
        if dbo_current_ubatch_id() == failing:
            raise ValueError("original")
        dbo_yield()
        transfer.wait()

    for _ in range(2):
        with pytest.raises(ValueError, match="original"):
            lanes.run(body, body)
        compute()
    lanes.cuda.check()


def test_a_lane_hangs_with_a_transfer_under_way(lanes: Lanes) -> None:
    released = threading.Event()

    def hangs() -> None:
        launch(compute())
        released.wait(20)

    try:
        with pytest.raises(UBatchTimeout):
            lanes.run(hangs, compute, timeout_s=0.3)
        compute()
        lanes.run(exchange(), exchange())
    finally:
        released.set()
    lanes.cuda.check()


def test_a_hook_raises(lanes: Lanes) -> None:
    def body() -> None:
        transfer = launch(compute())
        ubatch.dbo_register_recv_hook(lambda: transfer.wait().add(1).view(7))
        dbo_yield()

    with pytest.raises(RuntimeError, match="invalid for input"):
        lanes.run(body, body)
    compute()
    lanes.cuda.check()


def test_switching_by_hand(lanes: Lanes) -> None:
    def body() -> Tensor:
        x, arrived = compute(), torch.empty(4)
        for _ in range(3):
            ubatch.dbo_yield_and_switch_from_compute_to_comm()
            arrived.copy_(x)
            dbo_keep(x)
            del x
            ubatch.dbo_yield_and_switch_from_comm_to_compute()
            x, arrived = arrived * 2, torch.empty(4)
        return x

    run_and_check(lanes, body, body)


def test_what_was_kept_is_let_go(lanes: Lanes) -> None:
    """At the next join, not at the end of the step."""
    freed: list[int] = []

    def body() -> None:
        for layer in range(3):
            x = compute()
            dbo_switch_to_comm()
            x.neg()
            dbo_keep(x, _Freed(lambda layer=layer: freed.append(layer)))
            dbo_switch_to_compute()
            assert freed[-1:] == [layer]

    run_and_check(lanes, body, dbo_yield)


class _Freed:
    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def __del__(self) -> None:
        self._then()


# ------------------------------------------------------------------------------------------------- allocated on comm


def _receives_on_comm(switch: Callable[[], None]) -> Body:
    """A lane that allocates what it receives on the communication stream, computes with it, and drops it."""

    def body() -> None:
        x = compute()
        for _ in range(3):
            switch()
            arrived = x.neg()
            dbo_keep(x)
            ubatch.dbo_yield_and_switch_from_comm_to_compute()
            x = arrived * 2
            del arrived

    return body


def test_memory_of_the_communication_stream_under_fresh_forks(lanes: Lanes) -> None:
    run_and_check(lanes, *[_receives_on_comm(dbo_switch_to_comm)] * 2)


def test_memory_of_the_communication_stream_under_a_mark_is_reused_too_early(lanes: Lanes) -> None:
    """Why the contract says to allocate before a switching point: seen by the checker."""
    lanes.run(*[_receives_on_comm(ubatch.dbo_yield_and_switch_from_compute_to_comm)] * 2)
    assert any("may still use" in each for each in lanes.cuda.lifetimes)


# -------------------------------------------------------------------------------------------- the checker sees errors


def test_a_join_that_is_left_out_is_a_race(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaneStreams, "join_comm", lambda self, upto=None: None)
    lanes.run(exchange(), exchange())
    assert any("0: mul on compute reads empty_like" in each and "copy_ on comm" in each for each in lanes.cuda.races)


@pytest.fixture
def triton_cases() -> Any:
    """Before the device is installed, which looks whether Triton is there."""
    pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")
    return importlib.import_module("triton_cases")


def test_triton_kernels_are_seen(triton_cases: Any, lanes: Lanes) -> None:
    """Interpreted ones run next to torch's dispatcher."""

    def body(wait: bool) -> Body:
        def run_kernel() -> None:
            transfer = launch(compute())
            arrived = transfer.wait() if wait else transfer._finish()  # type: ignore[misc]
            triton_cases.double_and_add(torch.ones(2, 4), arrived)

        return run_kernel

    run_and_check(lanes, body(True), dbo_yield)
    lanes.run(body(False), dbo_yield)
    reads, writes = (f"0: _double_and_add_kernel on compute {verb} empty_like" for verb in ("reads", "writes"))
    for verb in (reads, writes):
        assert any(race.startswith(verb) and "copy_ on comm" in race for race in lanes.cuda.races), lanes.cuda.races


def test_a_buffer_that_is_not_kept_is_freed_too_early(lanes: Lanes) -> None:
    lanes.run(exchange(keep=False), exchange(keep=False))
    assert any("copy_ on comm may still use: freed too early" in each for each in lanes.cuda.lifetimes)
    assert not lanes.cuda.races


@pytest.mark.parametrize(
    ("owner", "method", "case"),
    [
        (LaneStreams, "release", test_waited_for_on_the_communication_stream),
        (LaneStreams, "rejoin", test_nobody_waits),
        (Ledger, "keep", test_switching_by_hand),
    ],
)
def test_a_ledger_that_lets_go_is_seen(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, case: Callable[[Lanes], None]
) -> None:
    monkeypatch.setattr(owner, method, lambda self, *args, **kwargs: None)
    with pytest.raises(AssertionError, match="may still use"):
        case(lanes)


# ----------------------------------------------------------------------------------------- host reads and event queries


def test_the_host_waits_for_its_numbers_only(lanes: Lanes) -> None:
    def body() -> None:
        counts = compute()
        copies = copy_to_host(counts, counts + 1)
        dbo_yield()
        compute()
        one, other = copies.wait()
        assert (one.tolist(), other.tolist()) == ([2.0] * 4, [3.0] * 4)

    run_and_check(lanes, body, body)
    assert not lanes.cuda.syncs


def test_numbers_that_the_host_did_not_wait_for_are_a_race(lanes: Lanes) -> None:
    def body() -> None:
        copies = copy_to_host(compute())
        copies._finish()[0].tolist()  # type: ignore[misc, index]

    lanes.run(body, dbo_yield)
    assert any("has not waited" in each for each in lanes.cuda.races)


def test_waiting_for_the_host_ends() -> None:
    class Never(NullEvent):
        def query(self) -> bool:
            return False

    with pytest.raises(RuntimeError, match="has not arrived"):
        CopiedWork(Never()).wait(timedelta(milliseconds=5))
    assert CopiedWork(NullEvent()).wait()


def test_outside_lanes_what_is_on_the_host_is_there() -> None:
    numbers = torch.arange(3)
    transfer = copy_to_host(numbers)
    assert transfer.done()
    assert transfer.wait()[0] is numbers


def test_lanes_make_no_events_per_step(lanes: Lanes) -> None:
    lanes.run(exchange(), exchange())
    made = lanes.cuda.events
    for _ in range(3):
        lanes.run(exchange(), exchange())
    assert lanes.cuda.events == made == 2 * 3


# ----------------------------------------------------------------------------------------------- while capturing


class _Unaskable(FinishedWork):
    """A work whose event belongs to a capture: asking for it would end the capture."""

    def is_completed(self) -> bool:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_nothing_asks_an_event_while_a_graph_is_captured(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "capturing", lambda: True)
    monkeypatch.setattr(lane_streams, "capturing", lambda: True)
    monkeypatch.setattr(host_copy, "capturing", lambda: True)
    monkeypatch.setattr(lane_streams, "_abandoned", [])

    def fails() -> None:
        transfer: Transfer[None] = Transfer("send", [_Unaskable()], lambda: None, stream_ordered=True)
        with pytest.raises(UBatchError, match="'send': it cannot be queried while a graph is captured"):
            transfer.done()
        with pytest.raises(ConfigError, match="'counts': the host reads what the device computes"):
            copy_to_host(compute(), name="counts")
        Transfer("late", [_Unaskable()], lambda: None)
        raise ValueError("original")

    with pytest.raises(ValueError, match="original"):
        lanes.run(fails, dbo_yield)
    kept = [each for each in lane_streams._abandoned if isinstance(each, Transfer)]
    assert [each.name for each in kept] == ["late"], "kept until somebody may ask; the other one's stream was joined"
