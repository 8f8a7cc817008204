"""A lane that hangs, or a user who presses Ctrl-C: the step ends soon, says where lanes were, and the next one runs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from failure_cases import endless, usable
from lanes import FakeWork, lane_pool, lane_threads, no_lane_threads_within, run, walker, within

from ubatch import workers
from ubatch.dbo import dbo_yield
from ubatch.errors import LaneAborted, UBatchTimeout
from ubatch.ring import interleave
from ubatch.schedule import Schedule
from ubatch.streams import NullStreams
from ubatch.trace import tracing
from ubatch.transfer import Transfer

pytestmark = pytest.mark.timeout(60)


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
