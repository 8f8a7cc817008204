"""What a traced step tells the simulator, and what it leaves out."""

import pytest

from moe import EmulatedLink
from ranks import run_ranks
from serving.workbench.arms.programs import (
    gather_steps,
    gather_texts,
    middle_steps,
    predict_step,
    read_steps,
    traced_step,
    write_steps,
)
from serving.workbench.arms.stages import slowest_layer_times
from ubatch import CommGroup, Transfer, get_schedule
from ubatch.schedules.simulator import Compute, Launch, Op, Pass, Wait
from ubatch.trace.spans import Event, EventKind, SpanKind, current_trace
from ubatch.trace.spans import traced_step as one_step


@pytest.mark.parametrize("emulated", [True, False])
def test_a_step_is_traced_with_nothing_to_wait_for(emulated: bool) -> None:
    link = EmulatedLink(3600.0, 1.0)

    def step() -> None:
        with one_step():
            trace = current_trace()
            assert trace is not None
            sent: Transfer[int] = Transfer("sent", (), lambda: 7, bytes_sent=1, bytes_received=1)
            assert link.carry(sent).done() is emulated
            trace.add(SpanKind.TRANSFER, "sent", 0, 1.0, 9.0)  # arrives after the lanes, or before: no part of them
            trace.add(SpanKind.COMPUTE, "dispatch", 0, 2.0, 3.0)
            trace.add(SpanKind.WAIT, "sent", 0, 3.0, 3.5)
            trace.add(SpanKind.COMPUTE, "end", 1, 4.0, 5.0)
            trace.events.append(Event(trace.step, 0, EventKind.POINT, "dispatch", 0.75))
            trace.events.append(Event(trace.step, 1, EventKind.END, "end", 0.5))

    traced = traced_step(step, link if emulated else None)
    assert traced.programs == [[Compute(0.75), Pass("dispatch")], [Compute(0.5)]]
    assert traced.lanes_s == 3.0
    late: Transfer[int] = Transfer("late", (), lambda: 7, bytes_sent=1)
    assert not link.carry(late).done()  # afterwards the link takes its time again


def test_prediction_is_of_every_step_with_all_ranks_together() -> None:
    """Two ranks, each slow in another of two layers; in the third step both are slow throughout."""
    schedule = get_schedule("single_batch").one_by_one()

    def layer(number: int, experts: float) -> list[Op]:
        there, back = f"dispatch.{number}", f"combine.{number}"
        prepare: list[Op] = [Compute(1.0), Launch(there, 0.0), Compute(0.0), Pass("dispatch"), Wait(there)]
        return [*prepare, Compute(experts), Launch(back, 0.0), Compute(0.0), Pass("combine"), Wait(back)]

    def rank(*experts: float) -> list[list[Op]]:
        return [[op for number, each in enumerate(experts) for op in layer(number, each)]]

    even = [rank(2.0, 2.0), rank(2.0, 2.0)]
    uneven = [rank(4.0, 2.0), rank(2.0, 4.0)]
    slow = [rank(8.0, 8.0), rank(8.0, 8.0)]
    assert predict_step([even], schedule) == 6.0
    assert predict_step([uneven], schedule) == 10.0  # either alone needs 8
    assert predict_step([even, uneven, slow], schedule) == 10.0
    stages = slowest_layer_times([even, uneven, slow])
    assert (stages.times[""].experts, stages.times[""].attn_prepare, stages.kinds) == (3.0, 1.0, ("", ""))


def test_steps_in_a_file_predict_the_same() -> None:
    """Of any number of steps, those in the middle are enough."""
    schedule = get_schedule("mlp_shared_overlap")

    def rank(seconds: float) -> list[list[Op]]:
        there = Launch("dispatch of layer 0", 0.25, 0.5, hooked=False)
        lane: list[Op] = [Compute(seconds), there, Pass("dispatch"), Wait(there.key), Launch("x", 0.125, 0.125)]
        return [lane, lane]

    for count in (1, 2, 5, 6):
        steps = [[rank(1.0 + 7 * step % count), rank(2.0)] for step in range(count)]
        kept = middle_steps(steps, schedule)
        assert len(kept) == 2 - count % 2
        assert read_steps(write_steps(kept)) == kept
        assert predict_step(kept, schedule) == predict_step(steps, schedule)
    with pytest.raises(ValueError, match="'nonsense 1' is no operation of a lane"):
        read_steps([[[["nonsense 1"]]]])


def gather(rank: int, ranks: int) -> tuple[list[str], list[list[list[list[Op]]]]]:
    mine: list[list[list[Op]]] = [[[Compute(0.5 + rank), Pass("dispatch")], [Launch("sent", 0.25)]], [[Wait("sent")]]]
    group = CommGroup.from_process_group()
    return gather_texts("ü" * 3 * rank, group), gather_steps(mine, group)


def test_every_rank_gets_what_all_have_measured() -> None:
    first, second = run_ranks(gather, 2)
    assert first == second
    texts, steps = first
    assert texts == ["", "üüü"]
    assert [[programs[0] for programs in step] for step in steps] == [
        [[Compute(0.5), Pass("dispatch")], [Compute(1.5), Pass("dispatch")]],
        [[Wait("sent")], [Wait("sent")]],
    ]
