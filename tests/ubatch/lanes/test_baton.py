"""Exactly one lane runs, in the predicted order, with every kind of wake-up."""

import contextvars
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
from failure_cases import endless
from lanes import EVERY_POINT, OwnThreads, lane_pool, run, walker

from ubatch import Schedule, get_forward_context, get_schedule, interleave, make_ubatch_contexts, tracing
from ubatch.dbo import dbo_current_ubatch_id, dbo_enabled, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from ubatch.errors import ConfigError, LaneAborted, UBatchError
from ubatch.lanes.baton import Baton
from ubatch.lanes.wakeup import EventFdWakeUp, Gate, LockWakeUp, WakeUp, make_wakeup

KINDS: list[type[EventFdWakeUp] | type[LockWakeUp]] = [LockWakeUp]
if hasattr(os, "eventfd"):
    KINDS.insert(0, EventFdWakeUp)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[WakeUp]:
    """Every wake-up of the runtime is of this kind."""
    if request.param is LockWakeUp:
        monkeypatch.delattr(os, "eventfd", raising=False)
    assert type(make_wakeup()) is request.param
    chosen: type[WakeUp] = request.param
    return chosen


# ------------------------------------------------------------------------------------------------------------ wake-ups


def test_several_sets_before_the_wait_are_one(kind: type[WakeUp]) -> None:
    wakeup = kind()
    for _ in range(3):
        wakeup.set()
    wakeup.wait()
    assert not wakeup.wait_for(0.01)


def test_wait_for_gives_up_in_time(kind: type[WakeUp]) -> None:
    wakeup = kind()
    start = time.monotonic()
    assert not wakeup.wait_for(0.05)
    assert 0.04 <= time.monotonic() - start < 10.0


def test_a_set_wakes_another_thread(kind: type[WakeUp]) -> None:
    wakeup, woken = kind(), threading.Event()
    thread = threading.Thread(target=lambda: (wakeup.wait(), woken.set()))
    thread.start()
    assert not woken.wait(0.05)
    wakeup.set()
    assert woken.wait(20)
    thread.join()


def test_a_gate_opens_when_all_have_arrived_and_can_be_used_again(kind: type[WakeUp]) -> None:
    gate = Gate(3)
    for _ in range(2):
        gate.arrive()
        gate.arrive()
        assert not gate.wait_for(0.01)
        gate.arrive()
        assert gate.wait_for(5)
        assert not gate.wait_for(0.0)
        gate.close_again()


# --------------------------------------------------------------------------------- the real order is the computed one


@pytest.mark.parametrize("lead", range(5))
@pytest.mark.parametrize("lanes", [2, 3, 4, 8])
def test_the_real_trace_equals_the_computed_order(kind: type[WakeUp], lanes: int, lead: int) -> None:
    schedule = Schedule("test", lead=lead, points_off=frozenset())
    with lane_pool(lanes) as pool:
        for lengths in (
            [4] * lanes,
            range(lanes),
            range(lanes, 0, -1),
            ([0, 5, 1, 3] * 2)[:lanes],
            ([6, 0, 0, 1] * 2)[:lanes],
        ):
            programs = [[f"p{index}" for index in range(length)] for length in lengths]
            with tracing() as trace:
                run(pool, *map(walker, programs), schedule=schedule)
            assert trace.order == interleave(programs, lead=lead), (list(lengths), lead)


def test_the_order_does_not_depend_on_how_long_lanes_take(kind: type[WakeUp]) -> None:
    dice = random.Random(1)

    def slow(program: Sequence[str]) -> Callable[[], None]:
        def body() -> None:
            for point in program:
                time.sleep(dice.choice([0.0, 0.0, 0.002]))
                dbo_yield(point)

        return body

    programs = [["a", "b", "c"], ["d"], ["e", "f"]]
    with lane_pool(3) as pool, tracing() as trace:
        for _ in range(5):
            trace.clear()
            run(pool, *map(slow, programs))
            assert trace.order == interleave(programs)


def test_exactly_one_lane_runs(kind: type[WakeUp]) -> None:
    log: list[int] = []

    def body() -> None:
        for _ in range(20):
            log.append(dbo_current_ubatch_id())
            time.sleep(0.0003)
            log.append(dbo_current_ubatch_id())
            dbo_yield()

    with lane_pool(4) as pool:
        run(pool, *[body] * 4)
    assert log == [lane for _ in range(20) for lane in range(4) for _ in range(2)], "nobody came in between"


# ------------------------------------------------------------------------------------------------------ the invariant


def test_a_lane_without_the_baton_may_not_pass_it_on() -> None:
    baton = Baton(2)
    baton.prepare(0)
    with pytest.raises(UBatchError, match=r"lane 1 runs, but lane 0 holds the baton"):
        baton.pass_on(1)


def test_statistics_of_a_baton() -> None:
    baton = Baton(3)
    baton.prepare(0)
    baton.start()
    assert baton.statistics().holder == 0
    baton.leave(0)
    state = baton.statistics()
    assert (state.holder, state.handoffs, state.alive, state.aborted) == (1, 1, (False, True, True), False)
    assert 0 <= state.held_s < 5
    baton.abort(1)
    baton.abort(2)
    assert baton.aborted_by == 1, "the first failure counts"
    assert baton.statistics().aborted


def test_the_previous_living_lane() -> None:
    baton = Baton(4)
    baton.prepare(0)
    assert [baton.previous(lane) for lane in range(4)] == [3, 0, 1, 2]
    baton.leave(0)
    baton.leave(1)
    assert [baton.previous(lane) for lane in (2, 3)] == [3, 2]
    baton.leave(2)
    assert baton.previous(3) == 3


@pytest.mark.parametrize("call", [dbo_yield, dbo_maybe_run_recv_hook, lambda: dbo_register_recv_hook(int)])
def test_a_point_from_a_foreign_thread_is_refused(call: Callable[[], None]) -> None:
    def body() -> str:
        inherited = contextvars.copy_context()  # what asyncio.to_thread does
        with ThreadPoolExecutor(1) as foreign:
            return str(foreign.submit(inherited.run, call).exception(20))

    with lane_pool() as pool:
        assert "reached a point from another thread" in run(pool, body, walker("a"))[0]


def test_a_plain_thread_started_in_a_lane_is_outside_it() -> None:
    def body() -> list[bool]:
        with ThreadPoolExecutor(1) as plain:
            return [dbo_enabled(), plain.submit(lambda: (dbo_enabled(), dbo_yield())[0]).result(20)]

    with lane_pool() as pool:
        assert run(pool, body, body) == [[True, False]] * 2


# -------------------------------------------------------------------------------------------------------- outside lanes


def test_outside_a_lane_a_point_does_nothing() -> None:
    for _ in range(3):
        dbo_yield()
        dbo_yield("dispatch")
    assert dbo_yield("anything") is None  # type: ignore[func-returns-value]
    dbo_maybe_run_recv_hook()
    assert not dbo_enabled()
    assert dbo_current_ubatch_id() == 0


# -------------------------------------------------------------------------------------- contexts with one's own threads


def test_contexts_in_own_threads_take_turns() -> None:
    seen: list[tuple[int, int, int]] = []

    def body() -> None:
        for step in range(3):
            context = get_forward_context()
            seen.append((dbo_current_ubatch_id(), step, context.num_tokens if context else -1))
            dbo_yield()

    threads = OwnThreads(3)
    threads.run(body, body, body)
    assert not threads.errors
    assert seen == [(lane, step, lane) for step, lane in product(range(3), range(3))]


def test_contexts_in_own_threads_fail_together() -> None:
    def fails() -> None:
        dbo_yield()
        raise ValueError("here")

    threads = OwnThreads(3)
    threads.run(endless, fails, endless)
    assert [index for index, _ in threads.errors] == [1, 2, 0], "the failed lane first, then the others in ring order"
    assert [type(error) for _, error in threads.errors] == [ValueError, LaneAborted, LaneAborted]


def test_a_context_cannot_be_entered_inside_a_lane() -> None:
    other = make_ubatch_contexts(2, None, None, [None, None], Gate(2))[1]

    def body() -> None:
        with other:
            pass

    with lane_pool() as pool, pytest.raises(UBatchError, match="lane 1 was entered from inside lane 0"):
        run(pool, body, walker("a"))


@pytest.mark.parametrize(
    ("lanes", "contexts", "schedule", "message"),
    [
        (1, 1, "serial", "num_ubatches must be at least 2, not 1"),
        (3, 2, "serial", "3 lanes need as many forward contexts"),
        (2, 2, "two_batch_decoed", "unknown schedule 'two_batch_decoed'; did you mean 'two_batch_decode'"),
    ],
)
def test_contexts_that_cannot_be(lanes: int, contexts: int, schedule: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_ubatch_contexts(lanes, None, None, [None] * contexts, Gate(lanes), schedule=schedule)


def test_contexts_take_a_schedule_by_name() -> None:
    contexts = make_ubatch_contexts(2, None, None, [None, None], Gate(2), schedule="two_batch_decode")
    assert all(context.schedule == get_schedule("two_batch_decode") for context in contexts)


@pytest.mark.parametrize("points", [0, 1], ids=["before its first turn", "at a point"])
def test_ctrl_c_in_a_lane_of_the_main_thread_unwinds_every_lane(points: int) -> None:
    """The main thread may run a lane itself; an interrupt while it is parked must not leave the others waiting."""
    ready = Gate(2)
    contexts = make_ubatch_contexts(2, None, None, [None, None], ready, schedule=EVERY_POINT)
    log: list[str] = []

    def other() -> None:
        try:
            with contexts[0]:
                for _ in range(points):
                    dbo_yield()
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)  # the main thread has been interrupted by now, but this lane holds the baton
                log.append("computed")
                dbo_yield()
                dbo_yield()
        except LaneAborted:
            log.append("aborted")

    def start() -> None:
        assert ready.wait_for(20)
        contexts[0].baton.start()

    threads = [threading.Thread(target=other), threading.Thread(target=start)]
    for thread in threads:
        thread.start()
    with pytest.raises(KeyboardInterrupt), contexts[1]:
        walker("ab"[: points + 1])()
    log.append("interrupted")
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert (log[0], sorted(log[1:])) == ("computed", ["aborted", "interrupted"])
    assert not dbo_enabled()
