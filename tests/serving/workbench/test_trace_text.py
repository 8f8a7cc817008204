"""A step as text: every row has its label and 81 columns of time; a second is a column here."""

from __future__ import annotations

import pytest

from serving.workbench.tracing.text import compare_steps, draw_lanes, last_step
from ubatch import Span, SpanKind
from ubatch.trace.spans import UNSPLIT

LANES = [
    Span(SpanKind.COMPUTE, "select", 0, 0.0, 20.0, 2),
    Span(SpanKind.COMPUTE, "combine.1", 0, 20.0, 42.0, 2),
    Span(SpanKind.TRANSFER, "combine", 0, 42.0, 81.0, 2),
    Span(SpanKind.COMPUTE, "layer", 0, 80.9, 81.0, 2),
    Span(SpanKind.COMPUTE, "select", 1, 42.0, 81.0, 2),
    Span(SpanKind.TRANSFER, "dispatch", 1, 0.0, 42.0, 2),
]
UNSPLIT_STEP = [
    Span(SpanKind.TRANSFER, "dispatch", UNSPLIT, 20.0, 60.0, 1),
    Span(SpanKind.WAIT, "dispatch", UNSPLIT, 20.0, 60.0, 1),
    Span(SpanKind.TRANSFER, "combine", UNSPLIT, 82.0, 122.0, 1),
    Span(SpanKind.WAIT, "combine", UNSPLIT, 82.0, 122.0, 1),
    Span(SpanKind.COMPUTE, "unsplit", UNSPLIT, 0.0, 162.0, 1),
]


def test_a_row_computes_and_one_is_on_the_link_per_lane() -> None:
    assert draw_lanes(LANES, 0.0, 81.0) == [
        "  lane 0 computes  " + "A" * 20 + "E" * 22,
        "  on the link      " + " " * 42 + "c" * 39,
        "  lane 1 computes  " + " " * 42 + "A" * 39,
        "  on the link      " + "d" * 42,
    ]


def test_an_unsplit_step_computes_where_it_does_not_wait() -> None:
    assert draw_lanes(UNSPLIT_STEP, 0.0, 162.0) == [
        "  computes         " + "A" * 10 + " " * 20 + "E" * 11 + " " * 20 + "A" * 20,
        "  on the link      " + " " * 10 + "d" * 20 + " " * 11 + "c" * 20,
    ]


def test_two_steps_are_drawn_to_one_scale() -> None:
    """The overlapped step takes half of the time, so that it ends in the middle of the lines."""
    serial, *rows = compare_steps(UNSPLIT_STEP, LANES)
    assert serial == "serial, 162000 ms"
    assert rows[:2] == draw_lanes(UNSPLIT_STEP, 0.0, 162.0)
    assert rows[2] == "overlapped, 81000 ms"
    assert rows[3:7] == draw_lanes(LANES, 0.0, 162.0)
    assert max(map(len, rows[3:7])) == 19 + 41
    ticks, numbers = rows[7:]
    fitting = [str(number) for number in range(0, 160_000, 20_000)]  # 160000 would pass the last column
    assert numbers.split() == ["ms", *fitting]
    assert ticks.index("|", 20) == numbers.index("20000") == 19 + 10
    assert max(map(len, (serial, *rows))) <= 100


def test_the_scale_is_in_milliseconds() -> None:
    step = [Span(SpanKind.COMPUTE, "unsplit", UNSPLIT, 5.0, 5.0904, 1)]
    assert compare_steps(step, step)[-1].split() == ["ms", *map(str, range(0, 81, 20))]


@pytest.mark.parametrize("missing", ["serial", "overlapped"])
def test_a_step_that_was_not_recorded_is_named(missing: str) -> None:
    steps = {"serial": UNSPLIT_STEP, "overlapped": LANES, missing: []}
    with pytest.raises(ValueError, match=f"the {missing} step has no span"):
        compare_steps(**steps)


def test_the_last_step_of_either_kind() -> None:
    spans = [*UNSPLIT_STEP, *LANES]
    assert {span.step for span in last_step(spans, in_lanes=True)} == {2}
    assert {span.step for span in last_step(spans, in_lanes=False)} == {1}
    assert last_step(LANES, in_lanes=False) == []
