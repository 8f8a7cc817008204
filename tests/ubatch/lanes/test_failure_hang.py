"""A lane that hangs, or a user who presses Ctrl-C: the step ends soon, says where lanes were, and the next one runs."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
from failure_cases import endless, one_of, usable
from lanes import FakeWork, FinishedWork, lane_pool, lane_threads, no_lane_threads_within, run, walker, within
from peer_failure_cases import promptly
from torch import Tensor
from wrapping import Plain, proved, rows

from ubatch import LaneAborted, Schedule, Transfer, UBatchTimeout, dbo_current_ubatch_id, dbo_yield
from ubatch.lanes import workers
from ubatch.ranks.connection import Connection, Work
from ubatch.streams.streams import NullStreams

pytestmark = pytest.mark.timeout(60)


# ---------------------------------------------------------------------------------------------------- a lane that hangs


@dataclass
class Hanging:
    """A lane that hangs after one point. By then every other lane has passed one."""

    release: threading.Event = field(default_factory=threading.Event)
    hangs: threading.Event = field(default_factory=threading.Event)
    unwound: threading.Event = field(default_factory=threading.Event)

    def body(self) -> None:
        try:
            dbo_yield("before")
            self.hangs.set()
            self.release.wait(30)
            dbo_yield("after")
        except LaneAborted:
            self.unwound.set()
            raise


SOON_S = 15.0
"""A wait for a lane that hangs would take twice as long."""


@contextmanager
def hanging() -> Iterator[Hanging]:
    """It hangs until the block ends, and is told to unwind then."""
    lane = Hanging()
    try:
        yield lane
    finally:
        lane.release.set()


@pytest.mark.long
@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_hang_is_reported_with_every_lanes_point_and_stack(which: int, lanes: int) -> None:
    which %= lanes
    with lane_pool(lanes, timeout_s=0.4) as pool:
        assert usable(pool), "its threads have started"
        with hanging() as hung:
            with promptly(SOON_S), pytest.raises(UBatchTimeout) as caught:
                run(pool, *one_of(lanes, which, hung.body))
            message = str(caught.value)
            assert f"lane {which} held the baton for" in message
            assert "(timeout_s = 0.4); last point 'before'. What this step wrote is invalid." in message
            for lane in range(lanes):
                assert f"lane {lane}: last point {'before' if lane == which else 'on'!r}" in message
            assert "release.wait(30)" in message
            assert message.count("in endless") == lanes - 1
            assert not hung.unwound.is_set()
            assert usable(pool), "the hung thread is replaced"
            assert pool.counts.threads_started == 2 * lanes
            assert within(5, lambda: len(lane_threads()) == lanes + 1), "all but the hung one have unwound"
        assert hung.unwound.wait(5), "the hung thread unwinds at its next point"
        assert usable(pool)
        assert within(5, lambda: len(lane_threads()) == lanes)


@pytest.mark.long
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
    noticed = threading.Event()

    def slow() -> None:
        dbo_yield()
        assert noticed.wait(20)

    def cleans_up() -> None:
        try:
            endless()
        finally:
            noticed.set()
            time.sleep(0.1)  # which ends when the lane that hung has ended too

    with lane_pool(timeout_s=0.25) as pool:
        for _ in range(2):
            noticed.clear()
            with pytest.raises(UBatchTimeout):
                run(pool, slow, cleans_up)
            assert usable(pool)
    assert no_lane_threads_within(5)


@pytest.mark.long
@pytest.mark.parametrize("point", ["user", "layer"])
def test_the_time_out_counts_from_the_last_point_even_one_that_is_switched_off(point: str) -> None:
    def slow() -> str:
        for _ in range(8):
            time.sleep(0.15)
            dbo_yield(point)
        return "done"

    schedule = Schedule("test", points_off=frozenset({"layer"}))
    with lane_pool(timeout_s=1.0) as pool:
        assert run(pool, slow, slow, schedule=schedule) == ["done", "done"]


@dataclass
class Bounded:
    """A connection, as far as a wait looks at it."""

    longest_wait_s: float

    def wait_for_works(self, works: Iterable[Work], name: str, check: Callable[[], None] | None) -> None:
        for work in works:
            work.wait(timedelta(seconds=0.1))


def waits_for(work: Work, **settings: Any) -> Callable[[], int]:
    """A lane that waits for one transfer."""

    def body() -> int:
        transfer = Transfer("slow link", [work], lambda: 7, **settings)
        dbo_yield("before")
        return transfer.wait()

    return body


def bounded(longest_wait_s: float) -> Any:
    return {"connection": cast(Connection, Bounded(longest_wait_s))}


@pytest.mark.long
def test_a_wait_on_a_connection_is_no_hang() -> None:
    """It has a time-out of its own, which knows the peer."""
    work = FakeWork()
    timer = threading.Timer(1.2, work.finish)
    with lane_pool(timeout_s=0.5) as pool:
        timer.start()
        assert run(pool, waits_for(work, **bounded(10.0)), walker("a", "x")) == [7, "x"]
    timer.join()


@contextmanager
def endless_work(*, regards_timeout: bool) -> Iterator[FakeWork]:
    """A transport's work that is never over, until the block is."""
    work = FakeWork(regards_timeout=regards_timeout)
    try:
        yield work
    finally:
        work.finish()


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, bounded(0.3), {"stream_ordered": True}])
@pytest.mark.parametrize("which", [0, 1])
def test_a_transfer_that_nobody_ends_is_a_hang(which: int, settings: dict[str, Any]) -> None:
    """It belongs to no connection, or its work takes no regard of the connection's time-out."""
    with lane_pool(timeout_s=0.5) as pool, endless_work(regards_timeout=False) as work:
        assert usable(pool)
        with promptly(SOON_S), pytest.raises(UBatchTimeout) as caught:
            run(pool, *one_of(2, which, waits_for(work, **settings)))
        assert f"lane {which} held the baton for" in str(caught.value)
        assert "last point 'before', 1 points passed, waiting for 'slow link'" in str(caught.value)
        assert usable(pool)


def test_the_time_out_of_a_transfer_can_be_suspended() -> None:
    with lane_pool(timeout_s=0.2) as pool, endless_work(regards_timeout=True) as work:
        timer = threading.Timer(0.8, work.finish)
        timer.start()
        assert run(pool, waits_for(work), walker("a", "x"), patient=True) == [7, "x"]
        timer.join()


@pytest.mark.long
def test_a_transfer_that_is_known_to_arrive_late_is_no_hang() -> None:
    def body() -> int:
        transfer = Transfer("emulated", [FinishedWork()], lambda: 7)
        transfer.delay_until(time.monotonic() + 1.2)
        dbo_yield()
        return transfer.wait()

    with lane_pool(timeout_s=0.4) as pool:
        assert run(pool, body, walker("a", "x")) == [7, "x"]


def test_a_wrapper_whose_transfer_is_stuck_works_again() -> None:
    works: list[FakeWork] = []

    def sending(x: Tensor) -> Tensor:
        for work in works:
            Transfer("mine", [work], lambda: None).wait()
        return x + 1

    with proved(Plain(sending), timeout_s=0.5) as wrapper:
        with endless_work(regards_timeout=True) as work:
            works.append(work)
            with pytest.raises(UBatchTimeout, match="waiting for 'mine'"):
                wrapper(rows(8))
        works.clear()
        assert torch.equal(wrapper(rows(8)), rows(8) + 1)


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


@contextmanager
def interrupt_when(*moments: threading.Event) -> Iterator[None]:
    """Press Ctrl-C once at each of these moments, one after the other."""

    def press() -> None:
        for moment in moments:
            if moment.wait(20):
                os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    gc.disable()  # Python drops an error inside a callback of the collector, and hypothesis has one
    try:
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        gc.enable()
    presser.join()


def test_ctrl_c_while_lanes_run() -> None:
    aborted: list[str] = []
    all_run = threading.Event()

    def body() -> None:
        try:
            while True:
                time.sleep(0.002)
                if dbo_current_ubatch_id() == 2:
                    all_run.set()
                dbo_yield()
        except LaneAborted as error:
            aborted.append(str(error))
            raise

    with lane_pool(3) as pool:
        for _ in range(2):
            aborted.clear()
            all_run.clear()
            with promptly(SOON_S), interrupt_when(all_run):
                run(pool, body, body, body)
            assert len(aborted) == 3
            assert usable(pool)
    assert no_lane_threads_within(5)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_ctrl_c_while_a_lane_hangs(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "UNWIND_S", 0.2)
    with lane_pool(3) as pool:
        with hanging() as hung:
            with promptly(SOON_S), interrupt_when(hung.hangs):
                run(pool, *one_of(3, which, hung.body))
            assert usable(pool)
            assert within(5, lambda: len(lane_threads()) == 3 + 1), "those parked behind the hung lane have ended"
            assert not hung.unwound.is_set()
        assert hung.unwound.wait(5)
        assert within(5, lambda: len(lane_threads()) == 3)


def test_ctrl_c_twice_does_not_wait_for_the_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    unwinding = threading.Event()
    unwind = workers.LanePool._unwind

    def tells(*args: Any) -> None:
        unwinding.set()
        unwind(*args)

    monkeypatch.setattr(workers.LanePool, "_unwind", tells)
    monkeypatch.setattr(workers, "UNWIND_S", 30.0)
    with lane_pool(timeout_s=30.0) as pool, hanging() as hung:
        with promptly(SOON_S), interrupt_when(hung.hangs, unwinding):
            run(pool, hung.body, endless)
        assert usable(pool)
    assert no_lane_threads_within(5)


def test_ctrl_c_while_lanes_get_ready() -> None:
    warming = threading.Event()

    class Slow(NullStreams):
        def warm_up(self) -> None:
            warming.set()
            time.sleep(0.3)

    with lane_pool(streams=Slow()) as pool:
        with interrupt_when(warming):
            run(pool, endless, endless)
        assert usable(pool)
        assert within(5, lambda: len(lane_threads()) == 2)
