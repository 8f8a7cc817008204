"""A lane that fails: the caller gets the original error, the other lanes unwind one by one, and the next step runs."""

import gc
import os
import random
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from failure_cases import endless, explode, fails, one_of, usable
from lanes import FakeWork, FinishedWork, lane_pool, lane_threads, no_lane_threads_within, open_files, run, within
from wrapping import Plain, rows, wrapped

from ubatch import Schedule, Transfer, UBatchTimeout, interleave
from ubatch.dbo import dbo_current_ubatch_id, dbo_register_recv_hook, dbo_switch_to_comm, dbo_yield
from ubatch.lanes.workers import LanePool
from ubatch.streams.streams import NullEvent, NullStreams

pytestmark = [pytest.mark.timeout(60), pytest.mark.long]


# ------------------------------------------------------------------------------------------------------- a lane raises


@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("points", [0, 1, 3])
@pytest.mark.parametrize("failing", [0, 1, -1])
def test_the_caller_gets_the_original_error(failing: int, points: int, lanes: int) -> None:
    failing %= lanes
    error = ValueError("original")
    assert fails(*one_of(lanes, failing, explode(points, error))) is error
    assert "exploding" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    last = repr(f"p{points - 1}") if points else "'start'"
    assert error.__notes__ == [f"raised in lane {failing} of {lanes}, last point {last}, {points} points passed"]


def test_a_failure_before_another_lane_ran_at_all() -> None:
    """Lane 0 fails before its first point: lane 1 never starts its body."""
    ran: list[int] = []
    fails(explode(0, ValueError("original")), lambda: ran.append(1))
    assert not ran


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
def test_any_exception_counts_as_failure(kind: type[BaseException]) -> None:
    fails(endless, explode(1, kind("original")), raises=kind)


def test_both_lanes_raise_and_the_first_counts() -> None:
    def second() -> None:
        try:
            endless()
        finally:
            raise KeyError("second")

    error = fails(explode(2, ValueError("original")), second)
    assert error.__notes__[1:] == ["lane 1 also raised KeyError('second') while it unwound"]


def test_lanes_unwind_one_at_a_time_in_ring_order() -> None:
    log: list[str] = []

    def lane(index: int) -> Callable[[], None]:
        def body() -> None:
            try:
                dbo_yield()
                if index == 1:
                    raise ValueError("lane 1")
                endless()
            finally:
                log.append(f"{index} unwinds")
                time.sleep(0.01)
                log.append(f"{index} has unwound")

        return body

    with lane_pool(4) as pool:
        for _ in range(5):
            log.clear()
            with pytest.raises(ValueError, match="lane 1"):
                run(pool, *map(lane, range(4)))
            assert log == [f"{index} {what}" for index in (1, 2, 3, 0) for what in ("unwinds", "has unwound")]
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

    fails(catching, explode(2, ValueError("original")))
    assert passed == [1, 1], "lane 0 came back from two points and not from the third"


def test_code_that_catches_everything_meets_the_abort_at_every_later_point() -> None:
    aborted: list[str] = []

    def catching() -> str:
        for index in range(6):
            try:
                dbo_yield("layer" if index > 3 else "on")
            except BaseException as error:
                aborted.append(str(error))
        return "half a batch"

    schedule = Schedule("test", points_off=frozenset({"layer"}))
    fails(catching, explode(1, ValueError("original")), schedule=schedule)
    assert aborted == ["lane 0 unwinds because lane 1 failed"] * 5, "also at points that are switched off"


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

    assert "last point 'cleaning', 1 points passed" in fails(body, endless).__notes__[0]


# ------------------------------------------------------------------------------------------------- hooks and transfers


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_inside_a_receive_hook(failing: int) -> None:
    def body() -> None:
        def hook() -> None:
            raise ValueError("in the hook")

        dbo_yield()
        dbo_register_recv_hook(hook)
        endless()

    notes = fails(*one_of(2, failing, body), match="in the hook").__notes__
    assert notes[0] == f"in the receive hook of lane {failing}, run by lane {failing}"
    assert notes[1].startswith(f"raised in lane {failing} of 2, last point 'on'")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_inside_the_wait_for_a_transfer(failing: int) -> None:
    error = ConnectionError("lost")

    def body() -> None:
        transfer = Transfer("dispatch", [FakeWork(error)], lambda: None)
        dbo_yield()
        transfer.wait()

    assert fails(*one_of(2, failing, body), raises=ConnectionError, match="lost") is error


def test_a_failure_inside_what_follows_a_transfer() -> None:
    def body() -> None:
        transfer = Transfer("combine", [FinishedWork()], lambda: 1).map(lambda one: one // 0)
        dbo_yield()
        transfer.wait()

    fails(endless, body, raises=ZeroDivisionError, match="zero")


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


class _BreaksOnce(NullStreams):
    """A device that fails once, while a lane rejoins its streams, as after an asynchronous CUDA error."""

    broken = False

    def new_event(self) -> NullEvent:
        outer = self

        class Event(NullEvent):
            def record(self, stream: Any) -> None:
                if outer.broken:
                    outer.broken = False
                    raise RuntimeError("device-side assert")

        return Event()

    def lane(self, error: Exception | None) -> Callable[[], str]:
        """A lane that returns or fails while the device is broken."""

        def body() -> str:
            dbo_yield()
            dbo_switch_to_comm()
            self.broken = True
            if error is not None:
                raise error
            return "half a batch"

        return body


def test_a_lane_that_cannot_rejoin_its_streams_still_leaves() -> None:
    streams = _BreaksOnce()
    error = fails(streams.lane(ValueError("original")), endless, streams=streams)
    assert "leaving lane 0 failed too: RuntimeError('device-side assert')" in error.__notes__


def test_a_failure_while_leaving_is_a_failure() -> None:
    streams = _BreaksOnce()
    fails(streams.lane(None), endless, raises=RuntimeError, match="device-side assert", streams=streams)


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
    assert threading.active_count() <= threads
    assert open_files() <= files
    for pool in pools.values():
        assert usable(pool)
        assert pool.counts.threads_started == pool.lanes
        pool.close()
    assert not lane_threads()


# ------------------------------------------------------------------------------------------ the wrapper, after failures


def _raise(error: BaseException) -> None:
    raise error


TROUBLE: dict[str, tuple[Callable[[], object], type[BaseException]]] = {
    "error": (lambda: _raise(ValueError("model")), ValueError),
    "abort": (lambda: _raise(KeyboardInterrupt()), KeyboardInterrupt),
    "hook": (lambda: dbo_register_recv_hook(lambda: _raise(ValueError("hook"))), ValueError),
    "wait": (lambda: Transfer("t", [FakeWork(OSError("link"))], int).wait(), OSError),
    "hang": (lambda: time.sleep(0.7), UBatchTimeout),
    "ctrl-c": (lambda: (os.kill(os.getpid(), signal.SIGINT), endless()), KeyboardInterrupt),
    "exit": (lambda: _raise(SystemExit(3)), SystemExit),
}


@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("trouble", TROUBLE)
def test_the_wrapper_can_be_used_again(trouble: str, lane: int) -> None:
    act, error = TROUBLE[trouble]
    troubled = [False]

    def forward(x: torch.Tensor) -> torch.Tensor:
        if troubled[0] and dbo_current_ubatch_id() == lane:
            act()
        dbo_yield()
        return x * 2

    with wrapped(Plain(forward), timeout_s=0.25 if trouble == "hang" else 20.0) as wrapper:
        for _ in range(2):
            for fails in (False, True, False):
                troubled[0] = fails
                with pytest.raises(error) if fails else wrapper.no_timeout():
                    assert wrapper(rows(6)).equal(rows(6) * 2)
        statistics = wrapper.statistics()
        assert (statistics.calls, statistics.engaged, statistics.declined) == (6, 4, {})
    assert no_lane_threads_within(5)
