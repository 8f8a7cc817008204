"""Receive hooks run exactly once: in which lane, when, and what happens without a hand-off."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from lanes import EVERY_POINT, FinishedWork, lane_pool, run, walker

from ubatch import Recv, Schedule, Transfer, UBatchError
from ubatch.dbo import dbo_current_ubatch_id, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from ubatch.lanes.workers import LanePool

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

    def lane(self, program: Sequence[str]) -> Callable[[], None]:
        """A lane that launches, passes points and uses what it has received, as the program says."""

        def body() -> None:
            for step in program:
                verb, _, what = step.partition(" ")
                if verb == "launch":
                    self.launch(what)
                elif verb == "pass":
                    dbo_yield(what or "user")
                else:
                    self.append(step)

        return body

    def layers(self, lane: int, layers: int) -> Callable[[], None]:
        """A lane of some layers: launch, hand on, use."""
        each = [(f"launch {lane}.{layer}", "pass", f"use {lane}.{layer}") for layer in range(layers)]
        return self.lane([*chain(*each)])


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


OWNER, PEER = Recv.OWNER, Recv.PEER
KEPT = "launch a, receive a in 0, use a, launch b, receive b in 1"
EXPECTED: dict[str, tuple[list[Recv], dict[str, Any], list[list[str]], str]] = {
    "a peer that does not launch leaves the hook to the owner": (
        [PEER],
        {},
        [["launch a", "pass", "use a"], ["pass", "pass"]],
        "launch a, receive a in 0, use a",
    ),
    "the peer of a lane whose neighbour has ended is the next living one": (
        [PEER],
        {},
        [["launch a", "pass", "use a"], [], ["launch c", "pass", "use c"]],
        "launch a, receive a in 2, launch c, use a, receive c in 2, use c",
    ),
    "an owner that keeps the baton at an inactive point": (
        [OWNER, PEER],
        {"off": frozenset({"layer"})},
        [["launch a", "pass layer", "use a"], ["launch b"]],
        KEPT,
    ),
    "an owner that leads": ([OWNER, PEER], {"lead": 1}, [["launch a", "pass", "use a"], ["launch b"]], KEPT),
    "an owner that is alone": (
        [OWNER, PEER],
        {},
        [["pass", "launch a", "pass", "use a"], ["launch b"]],
        "launch b, receive b in 1, launch a, receive a in 0, use a",
    ),
    "lane 0 ends": ([OWNER, PEER], {}, [["launch a"], ["use b"]], "launch a, receive a in 0, use b"),
    "lane 1 ends": ([OWNER, PEER], {}, [["use b"], ["launch a"]], "use b, launch a, receive a in 1"),
    "an owner that runs its hook itself before a second launch": (
        [OWNER],
        {},
        [["launch a", "launch b"], []],
        "launch a, receive a in 0, launch b, receive b in 0",
    ),
}


@pytest.mark.parametrize(("what", "recv"), [(what, recv) for what, (recvs, *_) in EXPECTED.items() for recv in recvs])
def test_who_receives_and_when(what: str, recv: Recv) -> None:
    _, schedule, programs, expected = EXPECTED[what]
    log = Log()
    with lane_pool(len(programs)) as pool:
        run(pool, *map(log.lane, programs), schedule=received_by(recv, **schedule))
    assert ", ".join(log) == expected


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
