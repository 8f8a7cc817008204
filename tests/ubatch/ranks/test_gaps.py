"""Work in gaps is done where a step waits for a transfer that has not arrived, and nowhere else."""

import time

import pytest
from lanes import FakeWork, FinishedWork, lane_pool, run

from ubatch import Transfer, dbo_yield
from ubatch.lanes.context import current_lane
from ubatch.ranks.waits import in_gaps, record_transfers


def arriving(name: str = "late", **how: bool) -> Transfer[int]:
    """A transfer that arrives in a while."""
    transfer: Transfer[int] = Transfer(name, (FinishedWork(),), lambda: 5, **how)
    transfer.delay_until(time.monotonic() + 0.3)
    return transfer


@pytest.mark.long
def test_a_wait_does_the_work_once_if_it_really_waits() -> None:
    done: list[int] = []
    assert arriving().wait() == 5
    with in_gaps(lambda: done.append(1)):
        assert arriving().wait() == 5
        assert done == [1]
        Transfer("arrived", (FinishedWork(),), lambda: 5).wait()
        Transfer.ready(1).wait()
        arriving("on a device", stream_ordered=True).wait()
        assert done == [1]
        again = arriving()
        again.wait()
        again.wait()
        assert done == [1, 1]
    arriving().wait()
    assert done == [1, 1]


def test_a_work_that_ends_meanwhile_is_found() -> None:
    work = FakeWork()
    with in_gaps(work.finish):
        assert Transfer("late", (work,), lambda: 5).wait() == 5


def test_lanes_do_it_and_what_it_launches_is_none_of_theirs() -> None:
    lanes: list[object] = []
    launched: list[Transfer[int]] = []

    def work() -> None:
        lanes.append(current_lane())
        launched.append(Transfer("beside", (FakeWork(),), lambda: 6))
        assert arriving("waited for beside").wait() == 5

    def body() -> int:
        lane = current_lane()
        value = arriving().wait()
        assert current_lane() is lane
        assert not lane.ledger.launched
        return value

    with lane_pool() as pool, record_transfers() as arrivals, in_gaps(work):
        assert run(pool, body, body) == [5, 5]
    assert (lanes, [each.name for each in arrivals]) == ([None, None], ["late", "late"])
    assert not any(each.done() for each in launched)


def test_an_error_in_it_is_the_steps() -> None:
    def work() -> None:
        raise ValueError("full")

    transfer = arriving()
    for _ in range(2):  # the transfer has failed with it
        with in_gaps(work), pytest.raises(ValueError, match="full"):
            transfer.wait()


def test_the_wait_begins_before_the_work() -> None:
    """So the work is no time in which the step computes."""
    with record_transfers() as arrivals, in_gaps(lambda: time.sleep(0.1)):
        arriving().wait()
    (found,) = arrivals
    assert found.arrived - found.waited > 0.2


def test_a_lane_that_is_to_end_does_nothing_beside() -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("full")

    def body() -> None:
        try:
            dbo_yield("point")
        except BaseException:
            arriving().wait()
            raise

    with lane_pool() as pool, in_gaps(lambda: done.append(1)), pytest.raises(ValueError, match="full"):
        run(pool, body, fail)
    assert not done
