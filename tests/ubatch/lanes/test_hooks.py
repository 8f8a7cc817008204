"""Receive hooks run exactly once: in which lane, when, and what happens without a hand-off."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from lanes import EVERY_POINT, FinishedWork, lane_pool, run, walker

from ubatch.dbo import dbo_current_ubatch_id, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from ubatch.errors import UBatchError
from ubatch.lanes.workers import LanePool
from ubatch.ranks.transfer import Transfer
from ubatch.schedules.schedule import Recv, Schedule

both_orders = pytest.mark.parametrize("recv", list(Recv))


@pytest.fixture(scope="module", params=[2, 3, 4])
def many(request: pytest.FixtureRequest) -> Iterator[LanePool]:
    """Pools of 2, 3 and 4 lanes."""
    with lane_pool(request.param) as pool:
        yield pool


@pytest.fixture(scope="module")
def two() -> Iterator[LanePool]:
    with lane_pool() as pool:
        yield pool


def received_by(recv: Recv, *, lead: int = 0, off: frozenset[str] = frozenset()) -> Schedule:
    return Schedule("test", recv=recv, lead=lead, points_off=off)


class Log(list[str]):
    """What happened, in order."""

    def launch(self, what: str) -> None:
        """As a kernel does: run what is due, launch, leave a hook."""
        dbo_maybe_run_recv_hook()
        self.append(f"launch {what}")
        dbo_register_recv_hook(lambda: self.append(f"receive {what} in {dbo_current_ubatch_id()}"))

    def layers(self, lane: int, layers: int) -> Callable[[], None]:
        """A lane of some layers: launch, hand on, use."""

        def body() -> None:
            for layer in range(layers):
                self.launch(f"{lane}.{layer}")
                dbo_yield()
                self.append(f"use {lane}.{layer}")

        return body


# ------------------------------------------------------------------------------------------------------- who and when


def test_the_owner_receives_when_the_baton_comes_back(many: LanePool) -> None:
    log, lanes = Log(), range(many.lanes)
    run(many, *[log.layers(lane, 2) for lane in lanes], schedule=received_by(Recv.OWNER))
    expected = [f"launch {lane}.0" for lane in lanes]
    for lane in lanes:
        expected += [f"receive {lane}.0 in {lane}", f"use {lane}.0", f"launch {lane}.1"]
    for lane in lanes:
        expected += [f"receive {lane}.1 in {lane}", f"use {lane}.1"]
    assert log == expected


def test_the_peer_receives_before_its_own_next_launch(many: LanePool) -> None:
    """vLLM's order. The last hook has no launch after it, so its owner runs it."""
    log, last = Log(), many.lanes - 1
    run(many, *[log.layers(lane, 2) for lane in range(many.lanes)], schedule=received_by(Recv.PEER))
    expected = ["launch 0.0"]
    for lane in range(1, many.lanes):
        expected += [f"receive {lane - 1}.0 in {lane}", f"launch {lane}.0"]
    expected += ["use 0.0", f"receive {last}.0 in 0", "launch 0.1"]
    for lane in range(1, many.lanes):
        expected += [f"use {lane}.0", f"receive {lane - 1}.1 in {lane}", f"launch {lane}.1"]
    expected += [f"use {lane}.1" for lane in range(last)]
    expected += [f"receive {last}.1 in {last}", f"use {last}.1"]
    assert log == expected


def test_a_peer_that_passes_a_point_without_launching_leaves_the_hook_to_the_owner(two: LanePool) -> None:
    log = Log()
    run(two, log.layers(0, 1), walker(["p", "q"]), schedule=received_by(Recv.PEER))
    assert log == ["launch 0.0", "receive 0.0 in 0", "use 0.0"]


def test_the_peer_of_a_lane_whose_neighbour_has_ended_is_the_next_living_one() -> None:
    log = Log()
    with lane_pool(3) as pool:
        run(pool, log.layers(0, 1), walker([]), log.layers(2, 1), schedule=received_by(Recv.PEER))
    assert log == ["launch 0.0", "receive 0.0 in 2", "launch 2.0", "use 0.0", "receive 2.0 in 2", "use 2.0"]


class Step:
    """Lanes that walk random programs: L launches and leaves a hook, p and o pass an active and an inactive point."""

    def __init__(self, recv: Recv) -> None:
        self.recv = recv
        self.launched: list[str] = []
        self.ran: Counter[str] = Counter()
        self.wrong: list[str] = []

    def lane(self, lane: int, program: str) -> Callable[[], None]:
        def body() -> None:
            pending = ""
            for index, op in enumerate(program):
                if op != "L":
                    dbo_yield("mine" if op == "p" else "layer")
                    if pending and not self.ran[pending]:
                        self.wrong.append(f"{pending} was late")
                    pending = ""
                elif not pending:
                    pending = f"{lane}.{index}"
                    self.launch(pending, lane)

        return body

    def launch(self, what: str, lane: int) -> None:
        def hook() -> None:
            self.ran[what] += 1
            if self.recv is Recv.OWNER and dbo_current_ubatch_id() != lane:
                self.wrong.append(f"{what} ran in lane {dbo_current_ubatch_id()}")

        dbo_maybe_run_recv_hook()
        dbo_register_recv_hook(hook)
        self.launched.append(what)


@both_orders
def test_whatever_lanes_do_every_hook_runs_once_and_in_time(many: LanePool, recv: Recv) -> None:
    dice = random.Random(many.lanes)
    for _ in range(60):
        step = Step(recv)
        programs = ["".join(dice.choices("Lpo", k=dice.randrange(9))) for _ in range(many.lanes)]
        schedule = received_by(recv, lead=dice.randrange(4), off=frozenset({"layer"}))
        run(many, *map(step.lane, range(many.lanes), programs), schedule=schedule)
        assert not step.wrong, programs
        assert step.ran == Counter(step.launched), programs


# --------------------------------------------------------------------------------------- the owner does not hand on


@both_orders
@pytest.mark.parametrize("where", ["inactive point", "lead", "alone"])
def test_an_owner_that_keeps_the_baton_receives_itself(two: LanePool, recv: Recv, where: str) -> None:
    log = Log()
    schedule = received_by(recv, lead=int(where == "lead"), off=frozenset({"layer"}))

    def keeps() -> None:
        if where == "alone":
            dbo_yield()  # the other lane ends meanwhile
        log.launch("a")
        dbo_yield("layer" if where == "inactive point" else "mine")
        log.append("use a")

    def other() -> None:
        log.launch("b")

    run(two, keeps, other, schedule=schedule)
    first = ["launch b", "receive b in 1"] if where == "alone" else []
    then = [] if where == "alone" else ["launch b", "receive b in 1"]
    assert log == [*first, "launch a", "receive a in 0", "use a", *then]


@both_orders
@pytest.mark.parametrize("lane", [0, 1])
def test_a_lane_that_ends_runs_its_pending_hook_first(two: LanePool, recv: Recv, lane: int) -> None:
    log = Log()
    bodies = [walker([]), walker([])]
    bodies[lane] = lambda: log.launch("a")
    bodies[1 - lane] = lambda: log.append(f"lane {1 - lane}")
    run(two, *bodies, schedule=received_by(recv))
    ending = ["launch a", f"receive a in {lane}"]
    other = [f"lane {1 - lane}"]
    assert log == (ending + other if lane == 0 else other + ending)


@both_orders
@pytest.mark.parametrize("passes_a_point", [True, False])
def test_a_hook_may_leave_another_one(two: LanePool, recv: Recv, passes_a_point: bool) -> None:
    """A receive in two steps, counts and then payload, say."""
    log: list[str] = []

    def counts() -> None:
        log.append("counts")
        dbo_register_recv_hook(lambda: log.append("payload"))

    def body() -> None:
        dbo_register_recv_hook(counts)
        if passes_a_point:
            dbo_yield()
            log.append("point")

    run(two, body, walker(["a"]), schedule=received_by(recv))
    assert log == (["counts", "point", "payload"] if passes_a_point else ["counts", "payload"])


@both_orders
def test_a_hook_may_pass_a_point(two: LanePool, recv: Recv) -> None:
    log: list[str] = []

    def hook() -> None:
        log.append("begins")
        dbo_yield()
        log.append("ends")

    def body() -> None:
        dbo_register_recv_hook(hook)
        dbo_yield()
        log.append("use")

    def other() -> None:
        for _ in range(3):
            log.append("other")
            dbo_yield()

    run(two, body, other, schedule=received_by(recv))
    assert log == ["other", "begins", "other", "ends", "use", "other"]


# ------------------------------------------------------------------------------------------------------ outside a lane


def test_outside_a_lane_a_hook_runs_at_once() -> None:
    log: list[int] = []
    dbo_register_recv_hook(lambda: log.append(dbo_current_ubatch_id()))
    assert log == [0]
    dbo_maybe_run_recv_hook()
    dbo_register_recv_hook(lambda: log.append(1))
    assert log == [0, 1]
    with pytest.raises(ZeroDivisionError) as caught:
        dbo_register_recv_hook(lambda: 1 // 0)
    assert not hasattr(caught.value, "__notes__")


# -------------------------------------------------------------------------------------------------------------- errors


@both_orders
@pytest.mark.parametrize("when", ["at a point", "before a launch", "at the end"])
def test_an_error_names_owner_and_runner(two: LanePool, recv: Recv, when: str) -> None:
    def owner() -> None:
        dbo_register_recv_hook(lambda: 1 // 0)
        if when == "before a launch" and recv is Recv.OWNER:
            dbo_maybe_run_recv_hook()
        if when != "at the end":
            dbo_yield()

    def peer() -> None:
        if when == "before a launch":
            dbo_maybe_run_recv_hook()

    runner = 1 if when == "before a launch" and recv is Recv.PEER else 0
    with pytest.raises(ZeroDivisionError) as caught:
        run(two, owner, peer, schedule=received_by(recv))
    first, second = caught.value.__notes__
    assert first == f"in the receive hook of lane 0, run by lane {runner}"
    assert second.startswith(f"raised in lane {runner} of 2")


@both_orders
def test_two_launches_without_a_point_between_are_refused(two: LanePool, recv: Recv) -> None:
    ran: list[str] = []

    def body() -> None:
        dbo_register_recv_hook(lambda: ran.append("first"))
        dbo_register_recv_hook(lambda: ran.append("second"))

    with pytest.raises(UBatchError, match=r"lane 0 registered a receive hook while .* Pass a point between"):
        run(two, body, walker(["a"]), schedule=received_by(recv))
    assert not ran, "a lane that failed waits for nobody"


def test_an_owner_may_run_its_hook_itself_before_a_second_launch(two: LanePool) -> None:
    log = Log()

    def body() -> None:
        log.launch("a")
        log.launch("b")

    run(two, body, walker([]), schedule=received_by(Recv.OWNER))
    assert log == ["launch a", "receive a in 0", "launch b", "receive b in 0"]


@both_orders
@pytest.mark.parametrize("failing", [0, 1])
def test_after_a_failure_pending_hooks_do_not_run_in_this_step_or_the_next(
    two: LanePool, recv: Recv, failing: int
) -> None:
    log = Log()

    def body() -> None:
        log.launch(f"{dbo_current_ubatch_id()}")
        if dbo_current_ubatch_id() == failing:
            raise ValueError("original")
        dbo_yield()

    with pytest.raises(ValueError, match="original"):
        run(two, body, body, schedule=received_by(recv))
    assert [line for line in log if line.startswith("receive")] == (
        ["receive 0 in 1"] if failing == 1 and recv is Recv.PEER else []
    )
    before = list(log)
    run(two, walker(["a"]), walker(["a"]), schedule=received_by(recv))
    assert log == before


# ----------------------------------------------------------------------------------------------------------- transfers


@both_orders
def test_a_transfer_as_hook_finishes_once_and_gives_its_result_to_the_owner(many: LanePool, recv: Recv) -> None:
    finished: Counter[int] = Counter()

    def body() -> list[object]:
        lane = dbo_current_ubatch_id()

        def finish() -> object:
            finished[lane] += 1
            return object()

        results: list[object] = []
        for _ in range(3):
            dbo_maybe_run_recv_hook()
            transfer = Transfer("dispatch", [FinishedWork()], finish)
            dbo_register_recv_hook(transfer.wait)
            dbo_yield()
            results.append(transfer.wait())
            assert transfer.wait() is results[-1]
        return results

    schedule = replace(EVERY_POINT, recv=recv)
    results = run(many, *[body] * many.lanes, schedule=schedule)
    assert finished == dict.fromkeys(range(many.lanes), 3)
    assert len({id(result) for lane in results for result in lane}) == 3 * many.lanes
