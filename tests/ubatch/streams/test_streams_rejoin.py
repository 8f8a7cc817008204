"""Communication rejoins the caller's stream when lanes end or fail, and the next step may begin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from streams_cases import Streams, model

from ubatch.dbo import dbo_current_ubatch_id, dbo_switch_to_comm, dbo_yield, on_comm_stream
from ubatch.schedules.schedule import get_schedule


def sender(fake: Streams, how: str) -> Callable[[], None]:
    """A lane that puts something on the communication stream, and never looks at it again."""

    def body() -> None:
        lane = dbo_current_ubatch_id()
        if how == "launched":
            fake.launch(f"send {lane}", reads=f"x{lane}", writes=f"y{lane}")
        else:
            dbo_switch_to_comm()
            fake.work(f"send {lane}", reads=[f"x{lane}"], writes=[f"y{lane}"])

    return body


@pytest.mark.parametrize("how", ["launched", "switched"])
def test_communication_rejoins_before_the_lanes_return(fake: Streams, how: str) -> None:
    for _ in range(2):
        fake.run(*[sender(fake, how)] * 3)
        assert fake.work("next").waits == frozenset(fake.operations[:-1])
    assert not fake.races


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("how", ["launched", "switched"])
def test_communication_rejoins_when_a_lane_fails(fake: Streams, how: str, failing: int) -> None:
    def body() -> None:
        sender(fake, how)()
        dbo_yield()
        if dbo_current_ubatch_id() == failing:
            raise ValueError("original")
        dbo_yield()

    for _ in range(2):
        with pytest.raises(ValueError, match="original"):
            fake.run(body, body)
        assert {"send 0", "send 1"} <= set(map(str, fake.operations[-2:]))
        assert fake.work("next").waits == frozenset(fake.operations[:-1])
    fake.run(model(fake), model(fake), schedule=get_schedule("two_batch_decode"))
    assert not fake.races


def test_communication_rejoins_when_a_launch_fails(fake: Streams) -> None:
    def body() -> None:
        with on_comm_stream():
            fake.work("half a launch", writes=["y"])
            raise ValueError("original")

    with pytest.raises(ValueError, match="original"):
        fake.run(body, lambda: None)
    assert "half a launch" in map(str, fake.work("next", reads=["y"]).waits)


def test_a_lane_that_ends_does_not_make_the_others_wait(fake: Streams) -> None:
    """Lane 1's transfer is under way while lane 0 ends and lane 1 computes on."""

    def ends() -> None:
        fake.launch("send 0", reads="x0", writes="y0")
        dbo_yield()

    def goes_on() -> None:
        transfer = fake.launch("send 1", reads="x1", writes="y1")
        dbo_yield()
        fake.work("compute 1", writes=["z1"])
        transfer.wait()

    fake.run(ends, goes_on)
    assert fake.waited_for_by("compute 1") == ["send 0"], "what ended has rejoined; what travels has not"


def test_a_step_without_communication_touches_no_event(fake: Streams) -> None:
    """An event that was recorded before a capture began must not be waited for inside it."""
    fake.run(*[sender(fake, "launched")] * 2)
    fake.log.clear()
    fake.run(dbo_yield, dbo_yield)
    assert fake.log == []
