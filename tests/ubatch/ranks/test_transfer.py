"""Transfers: the value is made once, every wait raises the error, and no wait is longer than necessary."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lanes import FinishedWork

import ubatch
from ranks import on_ranks
from ubatch import CommGroup, Schedule, Transfer
from ubatch.lanes.context import transfers_end_within
from ubatch.lanes.workers import SingleLane
from ubatch.ranks.waits import arrivals_now, record_transfers


class FakeWork:
    """A transport's work that ends when told to."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self.completed = False
        self.error = error
        self.waits = 0

    def is_completed(self) -> bool:
        return self.completed

    def wait(self, timeout: Any = None) -> bool:
        self.waits += 1
        if not self.completed and timeout is not None:
            raise RuntimeError("Operation timed out!")
        self.completed = True
        if self.error is not None:
            raise self.error
        return True


def test_a_ready_transfer_is_done() -> None:
    transfer = Transfer.ready("value", name="mine")
    assert (transfer.name, transfer.done(), transfer.wait(), transfer.wait()) == ("mine", True, "value", "value")
    assert (transfer.bytes_sent, transfer.bytes_received) == (0, 0)


def test_map_runs_once_and_in_order_when_waited_for() -> None:
    ran: list[str] = []

    def step(name: str) -> Callable[[int], int]:
        def run(value: int) -> int:
            ran.append(name)
            return value + 1

        return run

    transfer = Transfer.ready(0).map(step("first")).map(step("second"))
    assert ran == []
    assert (transfer.wait(), transfer.wait(), ran) == (2, 2, ["first", "second"])
    with pytest.raises(RuntimeError, match="already waited for"):
        transfer.map(step("late"))


def test_an_error_in_map_is_raised_by_every_wait() -> None:
    transfer: Transfer[float] = Transfer.ready(0).map(lambda value: 1 / value)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            transfer.wait()


def test_an_interrupted_wait_can_be_taken_up_again() -> None:
    class Interrupted(FakeWork):
        def wait(self, timeout: Any = None) -> bool:
            if self.waits == 0:
                self.waits += 1
                raise KeyboardInterrupt
            return super().wait(timeout)

    transfer: Transfer[int] = Transfer("fake", (Interrupted(),), lambda: 5)
    with pytest.raises(KeyboardInterrupt):
        transfer.wait()
    assert transfer.wait() == 5


def test_an_error_of_the_transport_is_raised_by_every_wait() -> None:
    transfer: Transfer[int] = Transfer("fake", (FakeWork(RuntimeError("lost")),), lambda: 5)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            transfer.wait()


def test_done_means_that_wait_does_not_wait() -> None:
    work = FakeWork()
    transfer: Transfer[int] = Transfer("fake", (work,), lambda: 5)
    assert not transfer.done()
    work.completed = True
    assert transfer.done()
    assert (transfer.wait(), transfer.wait(), work.waits) == (5, 5, 1)


def test_a_deadline_delays_arrival_and_is_slept_through() -> None:
    transfer = Transfer.ready(1)
    begun, cpu = time.monotonic(), time.process_time()
    transfer.delay_until(begun + 0.2)
    assert not transfer.done()
    assert transfer.wait() == 1
    assert time.monotonic() - begun >= 0.2
    assert time.process_time() - cpu < 0.1
    assert transfer.done()


class Late(FakeWork):
    """Says nothing, or False, when its time is over."""

    def __init__(self, *, says: object) -> None:
        super().__init__()
        self.says = says
        self.given: list[float | None] = []

    def wait(self, timeout: Any = None) -> Any:
        self.given.append(None if timeout is None else timeout.total_seconds())
        if timeout is not None and not self.completed:
            time.sleep(timeout.total_seconds())
        if self.completed or self.says is False:
            return self.completed
        raise RuntimeError("Operation timed out!")


@pytest.mark.parametrize("says", [None, False])
def test_a_transfer_without_a_connection_ends_with_its_surroundings(says: object) -> None:
    transfer: Transfer[int] = Transfer("lost", (Late(says=says),), lambda: 5)
    with transfers_end_within(0.2):
        for _ in range(2):
            with pytest.raises(ubatch.TransferTimeout, match=r"transfer 'lost' did not arrive within 0\.2 s"):
                transfer.wait()

    work = Late(says=says)
    in_time: Transfer[int] = Transfer("in time", (work,), lambda: 5)
    work.completed = True
    with transfers_end_within(7.0):
        assert in_time.wait() == 5
    assert work.given == [7.0]

    work = Late(says=says)
    device: Transfer[int] = Transfer("on the device", (work,), lambda: 5, stream_ordered=True)
    work.completed = True
    with transfers_end_within(7.0), transfers_end_within(None):
        assert device.wait() == 5
    assert work.given == [None]


def test_what_fails_at_once_has_not_run_out_of_time() -> None:
    class Broken(FakeWork):
        def wait(self, timeout: Any = None) -> bool:
            raise RuntimeError("the link is down")

    with transfers_end_within(20.0), pytest.raises(RuntimeError, match="the link is down"):
        Transfer("broken", (Broken(),), lambda: 5).wait()


def test_a_single_lanes_time_out_ends_its_transfers() -> None:
    schedule = Schedule("one", lanes=1, chunks=2)
    lane = SingleLane(torch.device("cpu"), timeout_s=0.2)
    with pytest.raises(ubatch.TransferTimeout, match="'lost'"):
        lane.run([lambda: Transfer("lost", (Late(says=False),), lambda: 5).wait()], schedule, [None])
    work = Late(says=False)

    def body() -> int:
        work.completed = True
        return Transfer("patient", (work,), lambda: 5).wait()

    assert lane.run([body], schedule, [None], patient=True) == [5]
    assert work.given == [None]


@on_ranks(1, timeout_s=1.0)
def test_waiting_for_works(rank: int, group: CommGroup) -> None:
    connection = group.usable_connection()

    class JustInTime(FakeWork):
        """Ends between the end of the slice and the question whether it is over."""

        def wait(self, timeout: Any = None) -> bool:
            if timeout is not None:
                self.completed = True
                raise RuntimeError("Operation timed out!")
            return super().wait()

    connection.wait_for_works((JustInTime(),), "just in time")
    assert connection.broken is None

    slow: list[Any] = [dist.all_reduce(torch.ones(1), group=connection.pg, async_op=True) for _ in range(3)]
    connection.wait_for_works(slow, "several")
    for work in slow:
        assert work.wait()

    class Stuck(FakeWork):
        def wait(self, timeout: Any = None) -> bool:
            time.sleep(timeout.total_seconds())
            return super().wait(timeout)

    begun = time.monotonic()
    asked = []
    with pytest.raises(ubatch.TransferTimeout, match=r"'stuck' longer than 1\.0 s"):
        connection.wait_for_works((Stuck(),), "stuck", lambda: asked.append(1))
    assert 1.0 <= time.monotonic() - begun < 6.0
    assert len(asked) >= 2
    with pytest.raises(ubatch.GroupBroken, match=r"out of step: .*'stuck'.* Call reset\(\)"):
        connection.check_usable()


def test_a_limit_that_is_left_open_is_gone_with_its_block() -> None:
    block = transfers_end_within(0.01)
    block.__enter__()
    del block  # as Ctrl-C in place of its end leaves it
    test_an_error_of_the_transport_is_raised_by_every_wait()


# ---------------------------------------------------------------------------------- when they arrived, for whoever asks


class Slow(FinishedWork):
    def wait(self, timeout: Any = None) -> bool:
        time.sleep(0.01)
        return super().wait(timeout)


def test_transfers_are_recorded_in_the_order_of_their_waits() -> None:
    with record_transfers() as arrivals:
        first, second = (Transfer(name, [Slow()], lambda: None) for name in ("dispatch", "combine"))
        second.wait()
        first.wait()
        first.wait()  # a second wait is none
        Transfer.ready(1).wait()  # nothing was sent
    assert [each.name for each in arrivals] == ["combine", "dispatch"]
    for each in arrivals:
        assert each.launched <= each.waited <= each.arrived - 0.009
        assert 0 <= each.cpu_s < 0.009


def test_an_emulated_links_deadline_is_the_arrival() -> None:
    with record_transfers() as arrivals:
        transfer = Transfer("dispatch", [FinishedWork()], lambda: None)
        deadline = time.monotonic() + 0.01
        transfer.delay_until(deadline)
        time.sleep(0.02)
        transfer.wait()
    assert arrivals[0].arrived == deadline


def test_nothing_is_recorded_outside() -> None:
    with record_transfers() as arrivals, pytest.raises(ValueError, match="invalid literal"):
        int("x")
    assert arrivals_now() is None
    Transfer("dispatch", [FinishedWork()], lambda: None).wait()
    assert arrivals == []
