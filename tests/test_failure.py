"""A lane that fails: the caller gets the original error, the other lanes unwind one by one, and the next step runs."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from lanes import FakeWork, lane_pool, lane_threads, no_lane_threads_within, open_files, run, walker, within
from torch import nn

from ubatch import UBatchConfig, UBatchWrapper, workers
from ubatch.dbo import dbo_current_ubatch_id, dbo_register_recv_hook, dbo_switch_to_comm, dbo_yield
from ubatch.errors import LaneAborted, UBatchTimeout
from ubatch.ring import interleave
from ubatch.schedule import Schedule
from ubatch.streams import NullEvent, NullStreams
from ubatch.trace import tracing
from ubatch.transfer import Transfer
from ubatch.workers import LanePool

pytestmark = pytest.mark.timeout(60)


def usable(pool: LanePool) -> bool:
    """Whether the next steps run as if nothing had been."""
    programs = [[f"{lane}{index}" for index in range(3 + lane)] for lane in range(pool.lanes)]
    for _ in range(2):
        with tracing() as trace:
            results = run(pool, *[walker(program, lane) for lane, program in enumerate(programs)])
        if results != list(range(pool.lanes)) or trace.order != interleave(programs):
            return False
    return True


def endless() -> None:
    while True:
        dbo_yield("on")


def explode(points: int, error: BaseException) -> Callable[[], None]:
    """A lane that raises after so many points."""

    def exploding() -> None:
        for index in range(points):
            dbo_yield(f"p{index}")
        raise error

    return exploding


# ------------------------------------------------------------------------------------------------------- a lane raises


@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("points", [0, 1, 3])
@pytest.mark.parametrize("failing", [0, 1, -1])
def test_the_caller_gets_the_original_error(failing: int, points: int, lanes: int) -> None:
    failing %= lanes
    error = ValueError("original")
    bodies: list[Callable[[], Any]] = [endless] * lanes
    bodies[failing] = explode(points, error)
    with lane_pool(lanes) as pool:
        with pytest.raises(ValueError, match="original") as caught:
            run(pool, *bodies)
        assert caught.value is error
        assert "exploding" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        last = repr(f"p{points - 1}") if points else "'start'"
        assert error.__notes__ == [f"raised in lane {failing} of {lanes}, last point {last}, {points} points passed"]
        assert usable(pool)


def test_a_failure_in_the_last_segment_after_the_other_lane_has_ended() -> None:
    with lane_pool() as pool:
        with pytest.raises(ValueError, match="late"):
            run(pool, walker("a", "done"), explode(4, ValueError("late")))
        assert usable(pool)


def test_a_failure_before_another_lane_ran_at_all() -> None:
    """Lane 0 fails before its first point: lane 1 never starts its body."""
    ran: list[int] = []
    with lane_pool() as pool:
        with pytest.raises(ValueError, match="early"):
            run(pool, explode(0, ValueError("early")), lambda: ran.append(1))
        assert not ran
        assert usable(pool)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
def test_any_exception_counts_as_failure(kind: type[BaseException]) -> None:
    with lane_pool() as pool:
        with pytest.raises(kind):
            run(pool, endless, explode(1, kind()))
        assert usable(pool)


def test_both_lanes_raise_and_the_first_counts() -> None:
    def second() -> None:
        try:
            endless()
        finally:
            raise KeyError("second")

    with lane_pool() as pool:
        with pytest.raises(ValueError, match="first") as caught:
            run(pool, explode(2, ValueError("first")), second)
        assert caught.value.__notes__[1:] == ["lane 1 also raised KeyError('second') while it unwound"]
        assert usable(pool)


def test_lanes_unwind_one_at_a_time_in_ring_order() -> None:
    unwinding: list[int] = []
    order: list[int] = []
    together: list[list[int]] = []

    def lane(index: int) -> Callable[[], None]:
        def body() -> None:
            try:
                dbo_yield()
                if index == 1:
                    raise ValueError("lane 1")
                endless()
            finally:
                unwinding.append(index)
                time.sleep(0.01)
                order.append(index)
                if len(unwinding) != 1:
                    together.append(list(unwinding))
                unwinding.remove(index)

        return body

    with lane_pool(4) as pool:
        for _ in range(5):
            order.clear()
            with pytest.raises(ValueError, match="lane 1"):
                run(pool, *map(lane, range(4)))
            assert order == [1, 2, 3, 0]
        assert not together
        assert usable(pool)


# ---------------------------------------------------------------------------------------- user code that catches things


def test_code_that_catches_exceptions_does_not_catch_the_abort() -> None:
    passed: list[int] = []

    def catching() -> None:
        for _ in range(10):
            try:
                dbo_yield()
            except Exception:  # what model code does; LaneAborted is none
                passed.append(-1)
            passed.append(1)

    with lane_pool() as pool:
        with pytest.raises(ValueError, match="original"):
            run(pool, catching, explode(2, ValueError("original")))
        assert passed == [1, 1], "lane 0 came back from two points and not from the third"
        assert usable(pool)


def test_code_that_catches_everything_meets_the_abort_at_every_later_point() -> None:
    aborted: list[str] = []

    def catching() -> str:
        for index in range(6):
            try:
                dbo_yield("off" if index == 4 else "on")
            except BaseException as error:
                aborted.append(str(error))
        return "half a batch"

    with lane_pool() as pool:
        with pytest.raises(ValueError, match="original"):
            run(pool, catching, explode(1, ValueError("original")))
        assert aborted == ["lane 0 unwinds because lane 1 failed"] * 5
        assert usable(pool)


def test_an_aborted_lane_meets_the_abort_at_points_that_are_switched_off_too() -> None:
    aborted: list[int] = []

    def catching() -> None:
        for point in ("user", "layer", "layer"):
            try:
                dbo_yield(point)
            except LaneAborted:
                aborted.append(1)

    schedule = Schedule("test", points_off=frozenset({"layer"}))
    with lane_pool() as pool:
        with pytest.raises(ValueError, match="original"):
            run(pool, catching, explode(0, ValueError("original")), schedule=schedule)
        assert len(aborted) == 3


def test_a_failure_that_the_lane_handles_itself_is_none() -> None:
    def handling() -> str:
        try:
            dbo_yield()
            raise ValueError("handled")
        except ValueError:
            dbo_yield()
            return "fine"

    with lane_pool() as pool:
        assert run(pool, handling, handling) == ["fine", "fine"]


def test_points_in_clean_up_still_hand_on_before_the_failure_is_known() -> None:
    """A `finally` that passes points runs before the lane has failed as far as the others can tell."""

    def body() -> None:
        try:
            raise ValueError("original")
        finally:
            dbo_yield("cleaning")

    with lane_pool() as pool:
        with pytest.raises(ValueError, match="original") as caught:
            run(pool, body, endless)
        assert "last point 'cleaning', 1 points passed" in caught.value.__notes__[0]
        assert usable(pool)


# ------------------------------------------------------------------------------------------------- hooks and transfers


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_inside_a_receive_hook(failing: int) -> None:
    def body() -> None:
        def hook() -> None:
            raise ValueError("in the hook")

        dbo_yield()
        dbo_register_recv_hook(hook)
        endless()

    bodies: list[Callable[[], Any]] = [endless, endless]
    bodies[failing] = body
    with lane_pool() as pool:
        with pytest.raises(ValueError, match="in the hook") as caught:
            run(pool, *bodies)
        assert caught.value.__notes__[0] == f"in the receive hook of lane {failing}, run by lane {failing}"
        assert caught.value.__notes__[1].startswith(f"raised in lane {failing} of 2, last point 'on'")
        assert usable(pool)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_inside_the_wait_for_a_transfer(failing: int) -> None:
    error = ConnectionError("lost")

    def body() -> None:
        transfer = Transfer("dispatch", [FakeWork(error)], lambda: None)
        dbo_yield()
        transfer.wait()

    bodies: list[Callable[[], Any]] = [endless, endless]
    bodies[failing] = body
    with lane_pool() as pool:
        with pytest.raises(ConnectionError, match="lost") as caught:
            run(pool, *bodies)
        assert caught.value is error
        assert usable(pool)


def test_a_failure_inside_what_follows_a_transfer() -> None:
    def body() -> None:
        work = FakeWork()
        work.finish()
        transfer = Transfer("combine", [work], lambda: 1).map(lambda one: one // 0)
        dbo_yield()
        transfer.wait()

    with lane_pool() as pool:
        with pytest.raises(ZeroDivisionError):
            run(pool, endless, body)
        assert usable(pool)


def _failing_step_with_a_transfer(pool: LanePool, work: FakeWork, how: str) -> weakref.ref[torch.Tensor]:
    buffers: list[weakref.ref[torch.Tensor]] = []

    def launching() -> None:
        buffer = torch.zeros(4)
        buffers.append(weakref.ref(buffer))
        Transfer("dispatch", [work], lambda: None, keep=(buffer,))
        del buffer
        dbo_yield()
        if how == "the launcher fails":
            raise ValueError("original")
        if how == "nobody waits":
            return
        endless()

    def other() -> None:
        dbo_yield()
        if how == "the peer fails":
            raise ValueError("original")

    with nullcontext() if how == "nobody waits" else pytest.raises(ValueError, match="original"):
        run(pool, launching, other)
    return buffers[0]


@pytest.mark.parametrize("how", ["the launcher fails", "the peer fails", "nobody waits"])
def test_buffers_live_until_the_transport_is_done_with_them(how: str) -> None:
    work = FakeWork()
    with lane_pool() as pool:
        buffer = _failing_step_with_a_transfer(pool, work, how)
        for _ in range(3):
            assert usable(pool)
            gc.collect()
            assert buffer() is not None, "the transport still writes there"
        work.finish()
        assert usable(pool)
        gc.collect()
        assert buffer() is None


def test_a_failed_step_keeps_no_tensors() -> None:
    refs: list[weakref.ref[torch.Tensor]] = []

    def body() -> None:
        held = torch.ones(3)
        refs.append(weakref.ref(held))
        dbo_yield()
        if len(refs) == 2:
            dbo_register_recv_hook(held.sum)
            raise ValueError("original")
        endless()

    with lane_pool() as pool:
        with suppress(ValueError):
            run(pool, body, body)
        # The error is gone, so everything is, without the help of the garbage collector.
        gc.disable()
        try:
            assert within(5, lambda: all(ref() is None for ref in refs))
        finally:
            gc.enable()


# ------------------------------------------------------------------------------------------------------ leaving a lane


class _BrokenStreams(NullStreams):
    """A device that fails while a lane rejoins its streams, as after an asynchronous CUDA error."""

    def __init__(self) -> None:
        self.broken = False

    def new_event(self) -> NullEvent:
        outer = self

        class Event(NullEvent):
            def record(self, stream: Any) -> None:
                if outer.broken:
                    raise RuntimeError("device-side assert")

        return Event()


def test_a_lane_that_cannot_rejoin_its_streams_still_leaves() -> None:
    streams = _BrokenStreams()

    def breaks() -> None:
        dbo_yield()
        dbo_switch_to_comm()
        streams.broken = True
        raise ValueError("original")

    with lane_pool(streams=streams) as pool:
        with pytest.raises(ValueError, match="original") as caught:
            run(pool, breaks, endless)
        assert "leaving lane 0 failed too: RuntimeError('device-side assert')" in caught.value.__notes__
        streams.broken = False
        assert usable(pool)


def test_a_failure_while_leaving_is_a_failure() -> None:
    streams = _BrokenStreams()

    def breaks() -> str:
        dbo_yield()
        dbo_switch_to_comm()
        streams.broken = True
        return "half a batch"

    with lane_pool(streams=streams) as pool:
        with pytest.raises(RuntimeError, match="device-side assert"):
            run(pool, breaks, endless)
        streams.broken = False
        assert usable(pool)


# ---------------------------------------------------------------------------------------------------- a lane that hangs


def test_a_lane_that_never_yields_is_fine() -> None:
    with lane_pool() as pool, tracing() as trace:
        assert run(pool, lambda: "all at once", walker("abc", "x")) == ["all at once", "x"]
    assert trace.order == interleave([[], "abc"])


@contextmanager
def hanging() -> Iterator[tuple[Callable[[], None], threading.Event]]:
    """A lane that hangs after one point, until the block ends; the event is set when it is told to unwind then."""
    release, unwound = threading.Event(), threading.Event()

    def hangs() -> None:
        try:
            dbo_yield("before")
            release.wait(30)
            dbo_yield("after")
        except LaneAborted:
            unwound.set()
            raise

    try:
        yield hangs, unwound
    finally:
        release.set()


@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_hang_is_reported_with_every_lanes_point_and_stack(which: int, lanes: int) -> None:
    which %= lanes
    with lane_pool(lanes, timeout_s=0.3) as pool:
        with hanging() as (hangs, unwound):
            bodies: list[Callable[[], Any]] = [endless] * lanes
            bodies[which] = hangs
            start = time.monotonic()
            with pytest.raises(UBatchTimeout) as caught:
                run(pool, *bodies)
            assert time.monotonic() - start < 3
            message = str(caught.value)
            assert f"lane {which} held the baton for" in message
            assert "(timeout_s = 0.3); last point 'before'. What this step wrote is invalid." in message
            for lane in range(lanes):
                assert f"lane {lane}: last point {'before' if lane == which else 'on'!r}" in message
            assert "release.wait(30)" in message
            assert message.count("in endless") == lanes - 1
            assert not unwound.is_set()
            assert usable(pool), "the hung thread is replaced"
            assert pool.statistics().threads_started == 2 * lanes
            assert within(5, lambda: len(lane_threads()) == lanes + 1), "all but the hung one have unwound"
        assert unwound.wait(5), "the hung thread unwinds at its next point"
        assert usable(pool)
        assert within(5, lambda: len(lane_threads()) == lanes)


def test_a_lane_that_comes_back_late_does_not_disturb_the_next_step() -> None:
    back = threading.Event()

    def late() -> None:
        time.sleep(0.6)
        back.set()
        endless()

    with lane_pool(timeout_s=0.2) as pool:
        with pytest.raises(UBatchTimeout):
            run(pool, late, endless)
        while not back.is_set():
            assert usable(pool)
        assert usable(pool)
        assert within(5, lambda: len(lane_threads()) == 2)


def test_a_lane_that_ends_while_the_others_unwind_from_its_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """All lanes end within the grace period, yet the baton was taken from one of them: it must not be used again."""
    monkeypatch.setattr(workers, "_LOOK_UP_S", 0.05)

    def slow() -> None:
        dbo_yield()
        time.sleep(0.4)  # the hang is noticed after some 0.3 s, and the grace period is as long as the time-out

    def cleans_up() -> None:
        try:
            endless()
        finally:
            time.sleep(0.2)  # which ends when the lane that hung has ended too

    with lane_pool(timeout_s=0.25) as pool:
        for _ in range(2):
            with pytest.raises(UBatchTimeout):
                run(pool, slow, cleans_up)
            assert usable(pool)
    assert no_lane_threads_within(5)


@pytest.mark.parametrize("point", ["user", "layer"])
def test_the_time_out_counts_from_the_last_point_even_one_that_is_switched_off(point: str) -> None:
    def slow() -> str:
        for _ in range(4):
            time.sleep(0.15)
            dbo_yield(point)
        return "done"

    schedule = Schedule("test", points_off=frozenset({"layer"}))
    with lane_pool(timeout_s=0.5) as pool:
        assert run(pool, slow, slow, schedule=schedule) == ["done", "done"]


def test_the_time_out_can_be_suspended() -> None:
    def compiles() -> str:
        time.sleep(0.5)
        return "compiled"

    with lane_pool(timeout_s=0.15) as pool:
        with pool.no_timeout(), pool.no_timeout():
            assert run(pool, compiles, walker("a", "x")) == ["compiled", "x"]
        with pytest.raises(UBatchTimeout):
            run(pool, compiles, walker("a", "x"))
        assert usable(pool)


def test_a_wait_for_a_transfer_is_no_hang() -> None:
    """It has a time-out of its own, which knows the peer."""
    work = FakeWork()

    def waits() -> int:
        transfer = Transfer("slow link", [work], lambda: 7)
        dbo_yield()
        return transfer.wait()

    timer = threading.Timer(0.5, work.finish)
    with lane_pool(timeout_s=0.15) as pool:
        timer.start()
        assert run(pool, waits, walker("a", "x")) == [7, "x"]
    timer.join()


def test_a_lane_that_never_gets_ready_is_a_time_out() -> None:
    release = threading.Event()

    class Stuck(NullStreams):
        def warm_up(self) -> None:
            if threading.current_thread().name == "ubatch-lane-1":
                release.wait(30)

    with lane_pool(timeout_s=0.2, streams=Stuck()) as pool:
        with pytest.raises(UBatchTimeout, match=r"lanes were not ready within 0\.2 s"):
            run(pool, walker("a"), walker("a"))
        release.set()
        assert usable(pool)
        assert within(5, lambda: len(lane_threads()) == 2)


# --------------------------------------------------------------------------------------------------------------- Ctrl-C


def interrupt_after(seconds: float) -> threading.Timer:
    """Press Ctrl-C."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_ctrl_c_while_lanes_run() -> None:
    aborted: list[str] = []

    def body() -> None:
        try:
            while True:
                time.sleep(0.002)
                dbo_yield()
        except LaneAborted as error:
            aborted.append(str(error))
            raise

    with lane_pool(3) as pool:
        for _ in range(2):
            aborted.clear()
            timer, start = interrupt_after(0.1), time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                run(pool, body, body, body)
            timer.join()
            assert time.monotonic() - start < 3
            assert len(aborted) == 3
            assert usable(pool)
    assert no_lane_threads_within(5)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_ctrl_c_while_a_lane_hangs(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_UNWIND_S", 0.2)
    with lane_pool(3) as pool:
        with hanging() as (hangs, unwound):
            bodies: list[Callable[[], Any]] = [endless] * 3
            bodies[which] = hangs
            timer, start = interrupt_after(0.1), time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                run(pool, *bodies)
            timer.join()
            assert time.monotonic() - start < 3
            assert usable(pool)
            assert within(5, lambda: len(lane_threads()) == 3 + 1), "those parked behind the hung lane have ended"
            assert not unwound.is_set()
        assert unwound.wait(5)
        assert within(5, lambda: len(lane_threads()) == 3)


def test_ctrl_c_twice_does_not_wait_for_the_lanes() -> None:
    with lane_pool() as pool, hanging() as (hangs, _):
        timers, start = [interrupt_after(0.1), interrupt_after(0.4)], time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run(pool, hangs, endless)
        assert time.monotonic() - start < 3
        for timer in timers:
            timer.join()
        assert usable(pool)
    assert no_lane_threads_within(5)


def test_ctrl_c_while_lanes_get_ready() -> None:
    class Slow(NullStreams):
        def warm_up(self) -> None:
            time.sleep(0.3)

    with lane_pool(streams=Slow()) as pool:
        timer = interrupt_after(0.1)
        with pytest.raises(KeyboardInterrupt):
            run(pool, endless, endless)
        timer.join()
        assert usable(pool)
        assert within(5, lambda: len(lane_threads()) == 2)


# -------------------------------------------------------------------------------------------------- a thousand failures


def test_a_thousand_runs_that_fail_anywhere() -> None:
    dice = random.Random(20)
    swallowed = 0

    class Planned(Exception):
        pass

    def lane(index: int, points: int, fails_at: int | None, swallows: bool) -> Callable[[], int]:
        def body() -> int:
            nonlocal swallowed
            for point in range(points + 1):
                if point == fails_at:
                    raise Planned(index)
                if point == points:
                    break
                try:
                    dbo_yield(f"p{point}")
                except BaseException:
                    if not swallows:
                        raise
                    swallowed += 1
            return index

        return body

    pools = {lanes: LanePool(lanes, torch.device("cpu"), 20.0) for lanes in (2, 3, 4)}
    for pool in pools.values():
        assert usable(pool)
    files, threads = open_files(), threading.active_count()
    failed = 0
    for _ in range(1000):
        lanes = dice.choice([2, 3, 4])
        lengths = [dice.randrange(6) for _ in range(lanes)]
        fails = [dice.randrange(length + 1) if dice.random() < 0.5 else None for length in lengths]
        lead = dice.choice([0, 0, 1, 2])
        bodies = [lane(index, lengths[index], fails[index], dice.random() < 0.3) for index in range(lanes)]
        # The computed order says which lane meets its failure first.
        order = interleave([[str(point) for point in range(length)] for length in lengths], lead=lead)
        stages = [(index, lengths[index] if name == "end" else int(name)) for index, name in order]
        first = next((index for index, stage in stages if fails[index] == stage), None)
        schedule = Schedule("random", lead=lead, points_off=frozenset())
        if first is None:
            assert run(pools[lanes], *bodies, schedule=schedule) == list(range(lanes))
        else:
            failed += 1
            with pytest.raises(Planned) as caught:
                run(pools[lanes], *bodies, schedule=schedule)
            assert caught.value.args == (first,)
    assert failed > 600
    assert swallowed > 100
    assert threading.active_count() == threads
    assert open_files() == files
    for pool in pools.values():
        assert usable(pool)
        assert pool.statistics().threads_started == pool.lanes
        pool.close()
    assert not lane_threads()


# ------------------------------------------------------------------------------------------ the wrapper, after failures


class Fragile(nn.Module):
    """Doubles its input; does in one lane what `trouble` says."""

    def __init__(self) -> None:
        super().__init__()
        self.trouble: Callable[[], object] | None = None
        self.lane = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dbo_yield()
        if self.trouble is not None and dbo_current_ubatch_id() == self.lane:
            self.trouble()
        dbo_yield()
        return x * 2


def _raise(error: BaseException) -> None:
    raise error


def _hook_fails() -> None:
    dbo_register_recv_hook(lambda: _raise(ValueError("hook")))


TROUBLE: dict[str, tuple[Callable[[], object], type[BaseException]]] = {
    "error": (lambda: _raise(ValueError("model")), ValueError),
    "abort": (lambda: _raise(KeyboardInterrupt()), KeyboardInterrupt),
    "hook": (_hook_fails, ValueError),
    "wait": (lambda: Transfer("t", [FakeWork(OSError("link"))], int).wait(), OSError),
    "hang": (lambda: time.sleep(0.7), UBatchTimeout),
    "ctrl-c": (lambda: (os.kill(os.getpid(), signal.SIGINT), endless()), KeyboardInterrupt),
    "exit": (lambda: _raise(SystemExit(3)), SystemExit),
}


@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("trouble", TROUBLE)
def test_the_wrapper_can_be_used_again(trouble: str, lane: int) -> None:
    model = Fragile()
    wrapper = UBatchWrapper(model, UBatchConfig(dbo_prefill_token_threshold=2, timeout_s=0.25))
    x = torch.arange(6.0)
    try:
        for _ in range(2):
            assert wrapper(x).equal(x * 2)
            model.trouble, error = TROUBLE[trouble]
            model.lane = lane
            with pytest.raises(error):
                wrapper(x)
            model.trouble = None
            assert wrapper(x).equal(x * 2)
        statistics = wrapper.statistics()
        assert (statistics.calls, statistics.engaged, statistics.declined) == (6, 4, {})
    finally:
        wrapper.close()
    assert no_lane_threads_within(5)
