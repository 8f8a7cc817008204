"""Recording a trace: spans that fill a lane's turns, transfers from launch to arrival, events in order."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
from lanes import FakeWork, FinishedWork, lane_pool, run, walker
from torch import Tensor, nn
from wrapping import Plain, wrapped

from ubatch import Recv, Schedule, Transfer, interleave
from ubatch.dbo import dbo_current_ubatch_id, dbo_maybe_run_recv_hook, dbo_register_recv_hook, dbo_yield
from ubatch.lanes.workers import LanePool
from ubatch.schedules.simulator import Compute, Launch, Pass, Wait, programs_of, simulate
from ubatch.trace.spans import UNSPLIT, EventKind, LinkTime, Span, SpanKind, Trace, current_trace, tracing
from ubatch.trace.stages import flows

LINK_S = 0.02


@pytest.fixture(scope="module", params=[2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[LanePool]:
    with lane_pool(request.param) as made:
        yield made


def send(name: str = "dispatch", link_s: float = LINK_S, sent: int = 3, received: int = 4) -> Transfer[str]:
    """A transfer that arrives `link_s` after its launch."""
    transfer = Transfer(name, [FinishedWork()], lambda: "arrived", bytes_sent=sent, bytes_received=received)
    transfer.delay_until(time.monotonic() + link_s)
    return transfer


def layers(number: int, link_s: float = LINK_S) -> Callable[[], None]:
    """A lane: compute, launch, pass an active and an inactive point, wait, compute."""

    def body() -> None:
        for _ in range(number):
            time.sleep(0.002)
            dbo_maybe_run_recv_hook()
            transfer = send(link_s=link_s)
            dbo_register_recv_hook(transfer.wait)
            dbo_yield("dispatch")
            transfer.wait()
            dbo_yield("layer")

    return body


SCHEDULE = Schedule("test", points_off=frozenset({"layer"}))
PROGRAM = ["launch dispatch.{0}", "point dispatch", "wait dispatch.{0}", "point layer"]


def of(spans: Sequence[Span], *kinds: SpanKind, lane: int | None = None) -> list[Span]:
    """Spans of some kinds, in the order in which they began."""
    chosen = [span for span in spans if span.kind in kinds and lane in (None, span.lane)]
    return sorted(chosen, key=lambda span: (span.start, span.end))


# ---------------------------------------------------------------------------------------------------- a lane's turns


def test_spans_fill_the_turns_of_lanes_and_lanes_take_turns(pool: LanePool) -> None:
    with tracing() as trace:
        begun = time.monotonic()
        run(pool, *[layers(3)] * pool.lanes, schedule=SCHEDULE)
        ended = time.monotonic()
    held = of(trace.spans, SpanKind.COMPUTE, SpanKind.WAIT)
    assert begun <= held[0].start
    assert held[-1].end <= ended
    assert all(first.end <= second.start for first, second in pairwise(held)), "one lane at a time holds the baton"

    turns = [[held[0]]]
    for first, second in pairwise(held):
        if second.lane == first.lane and second.start == first.end:
            turns[-1].append(second)
        else:
            turns.append([second])
    assert [turn[0].lane for turn in turns] == list(range(pool.lanes)) * 4, "no gap but where the baton is handed on"
    # Every wait is between computes, and a turn ends with what it ended at.
    for turn in turns:
        assert turn[0].kind is turn[-1].kind is SpanKind.COMPUTE
    assert [turn[-1].name for turn in turns] == ["dispatch"] * 3 * pool.lanes + ["end"] * pool.lanes
    assert {span.step for span in trace.spans} == {0}

    for lane in range(pool.lanes):  # compute and waits are told apart
        transfers, waits = of(trace.spans, SpanKind.TRANSFER, lane=lane), of(trace.spans, SpanKind.WAIT, lane=lane)
        assert [each.name for each in transfers] == [each.name for each in waits] == ["dispatch"] * 3
        for transfer, wait in zip(transfers, waits, strict=True):
            assert transfer.start <= wait.start
            assert transfer.end <= wait.end
    slept = sum(span.end - span.start for span in of(trace.spans, SpanKind.COMPUTE))
    assert slept >= 3 * pool.lanes * 0.002


# -------------------------------------------------------------------------------------------------------------- events


def program_of(trace: Trace, lane: int) -> list[str]:
    return [f"{event.kind} {event.name}" for event in trace.events if event.lane == lane]


@pytest.mark.parametrize("recv", list(Recv))
def test_events_are_the_lanes_program(pool: LanePool, recv: Recv) -> None:
    """Also where a peer waits: the event belongs to the lane that launched."""
    schedule = Schedule("test", points_off=frozenset({"layer"}), recv=recv)
    with tracing() as trace:
        run(pool, *[layers(2, link_s=0.0)] * pool.lanes, schedule=schedule)
    expected = [line.format(layer) for layer in range(2) for line in PROGRAM] + ["end end"]
    for lane in range(pool.lanes):
        assert program_of(trace, lane) == expected
    assert all(event.cpu_s >= 0 and event.wait_cpu_s >= 0 for event in trace.events)
    programs = programs_of(trace, 0)
    for program in programs:
        assert [type(op) for op in program if not isinstance(op, Compute)] == [Launch, Pass, Wait, Pass] * 2
    assert list(simulate(programs, schedule).order) == trace.order


@pytest.mark.parametrize("recv", list(Recv))
def test_every_wait_has_an_arrow_from_the_launch_that_it_waits_for(pool: LanePool, recv: Recv) -> None:
    schedule = Schedule("test", points_off=frozenset({"layer"}), recv=recv)
    with tracing() as trace:
        run(pool, *[layers(2, link_s=0.001)] * pool.lanes, schedule=schedule)
    waits = of(trace.spans, SpanKind.WAIT)
    found = {wait: (lane, at) for lane, at, wait in flows(trace.spans)}
    assert waits
    assert set(found) == set(waits)
    for wait, (lane, at) in found.items():
        (launch,) = [span for span in of(trace.spans, SpanKind.COMPUTE, lane=lane) if span.start <= at < span.end]
        assert re.fullmatch(rf"{wait.name}\.\d+", launch.name)
        assert launch.end == wait.launched <= wait.start
    others = sum(lane != wait.lane for wait, (lane, _) in found.items())
    assert (others > 0) == (recv is Recv.PEER)


@pytest.mark.parametrize("recv", list(Recv))
def test_cpu_time_is_counted_once(pool: LanePool, recv: Recv) -> None:
    """Stages and waits together are the step's CPU time, whoever waits."""

    def body() -> None:
        for _ in range(3):
            burn(0.002)
            dbo_maybe_run_recv_hook()
            transfer: Transfer[None] = Transfer("t", [BurningWork()], lambda: None)
            dbo_register_recv_hook(transfer.wait)
            dbo_yield()
            burn(0.002)

    with tracing() as trace:
        before = time.process_time()
        run(pool, *[body] * pool.lanes, schedule=Schedule("test", recv=recv, points_off=frozenset()))
        spent = time.process_time() - before
    stages, waits = sum(event.cpu_s for event in trace.events), sum(event.wait_cpu_s for event in trace.events)
    assert stages >= pool.lanes * 3 * 0.004 * 0.9
    assert waits >= pool.lanes * 3 * 0.002 * 0.9
    assert stages + waits <= spent


def burn(seconds: float) -> None:
    """Use the CPU."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class BurningWork(FinishedWork):
    """A transport whose wait copies."""

    def wait(self, timeout: Any = None) -> bool:
        burn(0.002)
        return True


# ----------------------------------------------------------------------------------------------------------- transfers


def test_a_transfer_is_on_the_link_from_its_launch_to_its_arrival() -> None:
    arrivals: list[tuple[float, float]] = []

    def body() -> None:
        launched = time.monotonic()
        transfer = send("all_to_all", link_s=0.01)
        arrivals.append((launched, time.monotonic() + 0.01))
        dbo_yield()
        time.sleep(0.02)  # it arrives before anyone waits
        transfer.wait()
        transfer.wait()

    with lane_pool() as pool, tracing() as trace:
        run(pool, body, body)
    found = of(trace.spans, SpanKind.TRANSFER)
    assert [(span.lane, span.name, span.bytes) for span in found] == [(0, "all_to_all", 7), (1, "all_to_all", 7)]
    for span, (launched, latest) in zip(found, arrivals, strict=True):
        assert launched <= span.start
        assert span.end <= latest
        assert span.end - span.start >= 0.01


def test_a_transfer_that_queued_for_the_link_starts_when_it_had_it() -> None:
    begun = time.monotonic()
    with tracing() as trace:
        queued = send()
        queued.delay_until(begun + 0.03, started=begun + 0.02)
        queued.wait()
    (span,) = of(trace.spans, SpanKind.TRANSFER)
    assert (span.start, span.end) == pytest.approx((begun + 0.02, begun + 0.03), abs=1e-6)


def test_without_a_deadline_a_transfer_arrives_when_the_transport_ends() -> None:
    work = FakeWork()

    def body() -> None:
        transfer: Transfer[None] = Transfer("gloo", [work], lambda: None)
        dbo_yield()
        transfer.wait()

    def other() -> None:
        time.sleep(0.01)
        work.finish()

    with lane_pool() as pool, tracing() as trace:
        run(pool, body, other)
    (span,) = of(trace.spans, SpanKind.TRANSFER)
    (event,) = [event for event in trace.events if event.kind is EventKind.WAIT]
    assert span.end - span.start >= 0.01
    assert event.link.send_s == event.link.receive_s == pytest.approx(span.end - span.start, abs=1e-9)


def test_what_is_not_on_the_link_is_waited_for_but_not_drawn() -> None:
    def body() -> None:
        counts = send("counts", link_s=0.005).off_link()
        assert counts.wait() == "arrived"
        dbo_yield()

    with lane_pool() as pool, tracing() as trace:
        run(pool, body, body)
    assert not of(trace.spans, SpanKind.TRANSFER)
    assert [span.name for span in of(trace.spans, SpanKind.WAIT)] == ["counts"] * 2
    waits = [event for event in trace.events if event.kind is EventKind.WAIT]
    assert [(event.name, event.link) for event in waits] == [("counts.0", LinkTime())] * 2


def test_a_transfer_without_a_transport_leaves_no_trace() -> None:
    def body() -> None:
        assert Transfer.ready(3).wait() == 3
        dbo_yield()

    with lane_pool() as pool, tracing() as trace:
        run(pool, body, body)
    assert {span.kind for span in trace.spans} == {SpanKind.COMPUTE}
    assert {event.kind for event in trace.events} == {EventKind.POINT, EventKind.END}


def test_two_transfers_of_one_name_have_two_keys() -> None:
    def body() -> None:
        first, second = send("t", link_s=0.0), send("t", link_s=0.0)
        dbo_yield()
        second.wait()
        first.wait()

    with lane_pool() as pool:
        for _ in range(2):  # keys are counted per step
            with tracing() as trace:
                run(pool, body, walker([]))
            assert program_of(trace, 0) == [
                *("launch t.0", "launch t.1", "point user"),
                *("wait t.1", "wait t.0", "end end"),
            ]


# --------------------------------------------------------------------------------------------- when, and when it fails


def test_nothing_is_recorded_without_tracing() -> None:
    with lane_pool() as pool:
        with tracing() as trace:
            run(pool, layers(1), layers(1), schedule=SCHEDULE)
        before = list(trace.spans), list(trace.events), list(trace.order)
        assert all(before)
        run(pool, layers(1), layers(1), schedule=SCHEDULE)
        send().wait()
        assert (trace.spans, trace.events, trace.order) == before
    assert current_trace() is None


def test_nested_tracing_restores() -> None:
    with lane_pool() as pool, tracing() as outer:
        run(pool, walker(["outer"]), walker([]))
        with tracing() as inner:
            assert current_trace() is inner
            run(pool, walker(["inner"]), walker([]))
        assert current_trace() is outer
        with suppress(ValueError), tracing(inner) as same:
            assert same is inner
            raise ValueError("original")
        assert current_trace() is outer
        run(pool, walker(["again"]), walker([]))
    assert current_trace() is None
    assert inner.order == [(0, "inner"), (1, "end"), (0, "end")]
    assert [point for _, point in outer.order if point != "end"] == ["outer", "again"]


def test_clear_forgets_all_but_the_step() -> None:
    with lane_pool() as pool, tracing(Trace(step=4)) as trace:
        run(pool, walker("a"), walker("a"))
        assert {span.step for span in trace.spans} == {event.step for event in trace.events} == {4}
        trace.clear()
    assert trace == Trace(step=4)


def test_a_step_that_fails_is_traced_up_to_there_and_the_next_one_whole() -> None:
    def fails() -> None:
        dbo_yield("a")
        raise ValueError("original")

    with lane_pool() as pool, tracing() as trace:
        with pytest.raises(ValueError, match="original"):
            run(pool, fails, walker("abc"))
        assert trace.order == [(0, "a"), (1, "a")]
        trace.clear()
        run(pool, walker("a"), walker("a"))
        assert trace.order == interleave(["a", "a"])


# --------------------------------------------------------------------------------------------------------- the wrapper


class Model(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        transfer = send("dispatch", link_s=0.005)
        dbo_yield()
        transfer.wait()
        return x + dbo_current_ubatch_id()


def test_the_wrapper_counts_steps_and_records_unsplit_calls() -> None:
    with wrapped(Model(), dbo_prefill_token_threshold=4) as wrapper, tracing() as trace:
        begun = time.monotonic()
        assert wrapper(torch.zeros(2)).tolist() == [0, 0]
        ended = time.monotonic()
        assert wrapper(torch.zeros(4)).tolist() == [0, 0, 1, 1]
        assert wrapper(torch.zeros(2)).tolist() == [0, 0]
    assert trace.step == 3
    assert [{span.lane for span in trace.spans if span.step == step} for step in (1, 2, 3)] == [
        {UNSPLIT},
        {0, 1},
        {UNSPLIT},
    ]
    assert {event.step for event in trace.events} == {2}

    first = [span for span in trace.spans if span.step == 1]
    (compute,) = of(first, SpanKind.COMPUTE)
    (transfer,) = of(first, SpanKind.TRANSFER)
    (wait,) = of(first, SpanKind.WAIT)
    assert (compute.name, transfer.name, wait.name) == ("unsplit", "dispatch", "dispatch")
    assert begun <= compute.start <= transfer.start <= wait.start
    assert transfer.end <= wait.end <= compute.end <= ended
    assert transfer.bytes == 7


def test_an_unsplit_call_that_fails_is_recorded_too() -> None:
    with wrapped(Plain(lambda x: x.view(7)), enable_dbo=False) as wrapper, tracing() as trace:
        with pytest.raises(RuntimeError, match="invalid for input"):
            wrapper(torch.zeros(2))
        assert current_trace() is trace
    assert [(span.name, span.lane) for span in trace.spans] == [("unsplit", UNSPLIT)]
