"""The order of record, hand-off, switch and wait, without a GPU: every conflict between streams has an edge, and no
lane's communication waits for what another lane computes meanwhile.
"""

from collections.abc import Callable

import pytest
from fake_streams import Operation
from streams_cases import Streams, model, switching

import ubatch
from ubatch import Recv, Schedule, Transfer, UBatchContext, get_schedule
from ubatch.dbo import dbo_current_ubatch_id, dbo_switch_to_comm, dbo_switch_to_compute, dbo_yield, on_comm_stream

OVERLAPS = {
    "mlp_shared_overlap": {"dispatch during attention", "combine during experts"},
    "two_batch_prefill": {"dispatch during attention", "combine during experts"},
    "two_batch_decode": {"dispatch during output", "combine during attention"},
}
PEER = Schedule("peer", points_off=get_schedule("mlp_shared_overlap").points_off, recv=Recv.PEER)


# ---------------------------------------------------------------------------------------- the shape of the MoE kernel


def overlapped(fake: Streams) -> set[str]:
    """Pairs of a transfer and what another lane computes meanwhile, by what they are."""
    transfers = [each for each in fake.operations if each.stream is fake.comm]
    return {
        f"{transfer.name.split()[0]} during {other.name.split()[0]}"
        for transfer in transfers
        for other in fake.operations
        if other.lane != transfer.lane and other not in transfer.waits and transfer not in other.waits
    }


def in_turns(*stages: list[str]) -> list[str]:
    """The log of two lanes that hand on after every stage."""
    return [line.format(lane) for stage in stages for lane in (0, 1) for line in stage]


@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("name", OVERLAPS)
def test_every_conflict_has_an_edge_and_nothing_waits_without_need(fake: Streams, name: str, lanes: int) -> None:
    for _ in range(2):
        fake.run(*[model(fake)] * lanes, schedule=get_schedule(name))
        fake.work("merge", reads=[f"h{lane}" for lane in range(lanes)], writes=["output"])
    assert (fake.races, fake.excess()) == ([], {})
    assert OVERLAPS[name] <= overlapped(fake)
    assert set(fake.operations[:-1]) == fake.operations[-1].waits, "the caller's stream waits for all of it"


@pytest.mark.parametrize("lanes", [2, 3])
def test_peers_that_receive_wait_for_the_owners_communication(fake: Streams, lanes: int) -> None:
    """What a transfer's end unpacks in another lane must wait for the launcher's event, not for the runner's."""
    fake.run(*[model(fake)] * lanes, schedule=PEER)
    assert not fake.races
    assert "dispatch during attention" in overlapped(fake)


def test_the_order_of_one_exchange(fake: Streams) -> None:
    def body() -> None:
        lane = dbo_current_ubatch_id()
        fake.work(f"write {lane}", writes=[f"x{lane}"])
        transfer = fake.launch(f"send {lane}", reads=f"x{lane}", writes=f"y{lane}")
        ubatch.dbo_register_recv_hook(transfer.wait)
        dbo_yield()
        fake.work(f"read {lane}", reads=[f"y{lane}"])

    fake.run(body, body)

    assert fake.log == in_turns(
        [
            *("write {0} on compute", "{0} record compute", "{0} wait comm", "{0} switch comm", "send {0} on comm"),
            *("{0} record comm", "{0} switch compute"),  # before the hand-off: what the other lane sends does not count
        ],
        ["{0} wait compute", "unpack send {0} on compute", "read {0} on compute"],
    )
    assert fake.waited_for_by("unpack send 0") == ["write 0", "send 0", "write 1"]


# ------------------------------------------------------------------------------------------------ the switching points


@pytest.mark.parametrize("lanes", [2, 3])
def test_switching_points(fake: Streams, lanes: int) -> None:
    fake.run(*[switching(fake)] * lanes)
    assert (fake.races, fake.excess()) == ([], {})
    assert fake.waited_for_by("send 0.0") == ["write 0.0"], "not for what other lanes computed since the hand-off"


def test_the_order_of_switching_points(fake: Streams) -> None:
    fake.run(switching(fake, 1), switching(fake, 1))
    assert fake.log == in_turns(
        ["write {0}.0 on compute", "{0} record compute"],
        ["{0} wait comm", "{0} switch comm", "send {0}.0 on comm", "{0} record comm", "{0} switch compute"],
        ["{0} wait compute", "read {0}.0 on compute"],
    )


def test_switches_without_a_point(fake: Streams) -> None:
    def body() -> None:
        lane = dbo_current_ubatch_id()
        for layer in range(2):
            fake.work(f"write {lane}.{layer}", writes=[f"x{lane}"])
            dbo_switch_to_comm()
            fake.work(f"send {lane}.{layer}", reads=[f"x{lane}"], writes=[f"y{lane}"])
            dbo_yield()  # this lane is on the communication stream still, when the baton comes back
            fake.work(f"send more {lane}.{layer}", reads=[f"x{lane}"], writes=[f"y{lane}"])
            dbo_switch_to_compute()
            fake.work(f"read {lane}.{layer}", reads=[f"y{lane}"], writes=[f"x{lane}"])

    fake.run(body, body, body)
    assert (fake.races, fake.excess()) == ([], {})


def test_vllms_synchronised_switches_order_both_ways(fake: Streams) -> None:
    def body() -> None:
        lane = dbo_current_ubatch_id()
        fake.work(f"write {lane}", writes=[f"x{lane}"])
        ubatch.dbo_switch_to_comm_sync()
        fake.work(f"send {lane}", reads=[f"x{lane}"], writes=[f"y{lane}"])
        ubatch.dbo_switch_to_compute_sync()
        fake.work(f"read {lane}", reads=[f"y{lane}"], writes=[f"x{lane}"])
        dbo_yield()

    fake.run(body, body)
    assert not fake.races
    ubatch.dbo_switch_to_comm_sync()
    ubatch.dbo_switch_to_compute_sync()
    assert fake.current() is fake.compute


def test_vllms_previous_event_is_made_on_the_compute_stream(fake: Streams) -> None:
    """From whichever stream the lane is on, and without an edge between the two."""
    seen = []

    def capture(name: str, *, end: str) -> str:
        seen.append(fake.current())
        return name + end

    def body() -> None:
        assert ubatch.dbo_get_previous_event(capture, "event", end="!") == "event!"
        dbo_switch_to_comm()
        before = list(fake.log)
        assert ubatch.dbo_get_previous_event(capture, "event", end="?") == "event?"
        assert not [line for line in fake.log[len(before) :] if "wait" in line or "record" in line]
        with pytest.raises(ZeroDivisionError):
            ubatch.dbo_get_previous_event(lambda: 1 / 0)
        assert fake.current() is fake.comm
        dbo_switch_to_compute()

    fake.run(body, lambda: None)
    assert seen == [fake.compute, fake.compute]
    assert ubatch.dbo_get_previous_event(capture, "outside", end="") is None
    assert len(seen) == 2, "outside a lane nothing is called, as in vLLM"


def test_a_plain_point_before_a_launch_waits_for_what_the_others_compute(fake: Streams) -> None:
    """There is no telling that nothing was computed after the point; a switching point says so."""

    def body() -> None:
        lane = dbo_current_ubatch_id()
        fake.work(f"write {lane}", writes=[f"x{lane}"])
        dbo_yield()
        fake.launch(f"send {lane}", reads=f"x{lane}", writes=f"y{lane}")

    fake.run(body, body)
    assert (fake.races, fake.excess()) == ([], {"send 0": ["write 1"]})


def test_switching_to_where_one_is_waits_for_nobody(fake: Streams) -> None:
    def sends() -> None:
        fake.launch("send 0", reads="x0", writes="y0")
        dbo_yield()
        dbo_yield()

    def computes() -> None:
        dbo_switch_to_compute()
        fake.work("compute 1", writes=["z"])
        ubatch.dbo_yield_and_switch_from_comm_to_compute()
        fake.work("compute 1 again", writes=["z"])
        dbo_switch_to_comm()
        dbo_switch_to_comm()
        ubatch.dbo_yield_and_switch_from_compute_to_comm()
        fake.work("send 1", reads=["z"])

    fake.run(sends, computes)
    assert (fake.races, fake.excess()) == ([], {})
    assert fake.log.count("1 record compute") <= 2


def test_a_launch_on_the_communication_stream_stays_there(fake: Streams) -> None:
    def body() -> None:
        dbo_switch_to_comm()
        transfer = fake.launch("send", reads="x", writes="y")
        assert fake.current() is fake.comm
        with on_comm_stream():
            fake.work("send more", reads=["packed y"], writes=["more"])
        assert fake.current() is fake.comm
        dbo_switch_to_compute()
        transfer.wait()
        fake.work("read", reads=["y", "more"])

    fake.run(body, lambda: None)
    assert not fake.races


def test_outside_a_lane_nothing_switches(fake: Streams) -> None:
    dbo_switch_to_comm()
    dbo_switch_to_compute()
    ubatch.dbo_yield_and_switch_from_compute_to_comm()
    ubatch.dbo_yield_and_switch_from_comm_to_compute("point")
    transfer = fake.launch("send", reads="x", writes="y")
    assert transfer.wait().stream is fake.compute
    assert fake.log == ["send on compute", "unpack send on compute"]


# ------------------------------------------------------------------------------------------------------ receive hooks


@pytest.mark.parametrize("recv", list(Recv))
def test_a_hook_runs_on_the_compute_stream_after_the_owners_communication(fake: Streams, recv: Recv) -> None:
    """Even if owner and runner are on the communication stream, and the hook knows nothing of streams."""

    def body() -> None:
        lane = dbo_current_ubatch_id()
        dbo_switch_to_comm()
        fake.work(f"send {lane}", writes=[f"y{lane}"])
        ubatch.dbo_maybe_run_recv_hook()
        ubatch.dbo_register_recv_hook(lambda: fake.work(f"receive {lane}", reads=[f"y{lane}"], writes=[f"z{lane}"]))
        dbo_yield()
        assert fake.current() is fake.comm
        fake.work(f"forward {lane}", reads=[f"z{lane}"], writes=[f"y{lane}"])
        dbo_switch_to_compute()
        fake.work(f"read {lane}", reads=[f"y{lane}", f"z{lane}"])

    fake.run(body, body, body, schedule=Schedule("test", recv=recv, points_off=frozenset()))
    assert not fake.races
    assert {each.stream.name for each in fake.operations if each.name.startswith("receive")} == {"compute"}


@pytest.mark.parametrize("recv", list(Recv))
def test_a_hook_that_runs_in_a_switching_point_comes_before_what_is_launched_there(fake: Streams, recv: Recv) -> None:
    def body() -> None:
        lane = dbo_current_ubatch_id()
        ubatch.dbo_maybe_run_recv_hook()
        transfer = fake.launch(f"send {lane}", reads=f"x{lane}", writes=f"y{lane}")
        ubatch.dbo_register_recv_hook(transfer.wait)
        ubatch.dbo_yield_and_switch_from_compute_to_comm()
        fake.work(f"forward {lane}", reads=[f"y{lane}"], writes=[f"z{lane}"])
        ubatch.dbo_yield_and_switch_from_comm_to_compute()
        fake.work(f"read {lane}", reads=[f"z{lane}"])

    fake.run(body, body, schedule=Schedule("test", recv=recv, points_off=frozenset()))
    assert not fake.races


def test_whoever_waits_waits_for_the_launcher(fake: Streams) -> None:
    """A transfer that is given to another lane."""
    given: list[Transfer[Operation]] = []

    def launches() -> None:
        given.append(fake.launch("send", reads="x", writes="y"))
        dbo_yield()

    def waits() -> None:
        given[0].wait()
        fake.work("read", reads=["y"])

    fake.run(launches, waits)
    assert not fake.races


def test_a_wait_does_not_wait_for_what_other_lanes_send(fake: Streams) -> None:
    def body() -> None:
        lane = dbo_current_ubatch_id()
        transfer = fake.launch(f"send {lane}", reads=f"x{lane}", writes=f"y{lane}")
        dbo_yield()
        transfer.wait()

    fake.run(body, body, body)
    assert [each for each in fake.waited_for_by("unpack send 0") if each.startswith("send")] == ["send 0"]


# ----------------------------------------------------------------------------- the check itself: it sees what it should


def test_a_join_that_is_left_out_is_a_race(fake: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UBatchContext, "join_comm", lambda self, upto=None: None)
    fake.run(*[model(fake, 1)] * 2, schedule=get_schedule("mlp_shared_overlap"))
    assert "unpack dispatch 0.0 reads packed y0, which nothing orders after dispatch 0.0" in fake.races


def test_a_fork_that_is_left_out_is_a_race(fake: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    enter = UBatchContext.enter_comm
    monkeypatch.setattr(UBatchContext, "enter_comm", lambda self, **how: enter(self, marked=True))
    fake.run(*[model(fake, 1)] * 2, schedule=get_schedule("mlp_shared_overlap"))
    assert "dispatch 0.0 reads rows0, which nothing orders after pack 0.0" in fake.races


def test_a_mark_after_the_hand_off_costs_overlap(fake: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """What once cost vLLM most of its overlap."""
    monkeypatch.setattr(UBatchContext, "mark_compute", lambda self: False)
    fake.run(*[switching(fake, 1)] * 2)
    assert (fake.races, fake.excess()) == ([], {"send 0.0": ["write 1.0"]})


def test_overwriting_what_is_being_sent_is_a_race(fake: Streams) -> None:
    def body() -> None:
        fake.work("write", writes=["x"])
        fake.launch("send", reads="x", writes="y")
        fake.work("write again", writes=["x"])

    fake.run(body, lambda: None)
    assert fake.races == ["write again writes x, which nothing orders after send"]


# ---------------------------------------------------------------------------- communication rejoins the caller's stream


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
