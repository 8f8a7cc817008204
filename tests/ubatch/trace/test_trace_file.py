"""Traces of several ranks: written, read again, converted to one clock and common step numbers.

And the notes of a wrapper on its steps in a trace.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from wrapper_cases import Model, x_of
from wrapping import FIRST, Plain, wrapped

from ubatch import ConfigError, ForwardContext, ForwardMode, set_forward_context, tracing
from ubatch.trace.export import Clock, chrome_events, describe_note, handoffs, summarise, write_chrome
from ubatch.trace.file import RankTrace, merge_traces, read_chrome
from ubatch.trace.spans import UNSPLIT, Span, SpanKind, StepNote, note_outcome, note_step, traced_step
from ubatch.trace.stages import points, stage_names

COMPUTE, WAIT, TRANSFER = SpanKind.COMPUTE, SpanKind.WAIT, SpanKind.TRANSFER
HERE, THERE = Clock("here", 1000.0), Clock("there", 5000.0)
NOTE = StepNote(2, "decode", 64, "mlp_shared_overlap", lanes=2, start=11.5, end=13.25)
DECLINED = StepNote(1, "prefill", 3, "mlp_shared_overlap", reason="peer_declined", declined_by=1, start=9.0, end=11.0)

STEP = (
    # Lane 0: launch, point, [lane 1], wait, end. Lane 1 begins 10 ms after the hand-off.
    Span(COMPUTE, "dispatch.0", 0, 10.00, 10.10, 2),
    Span(COMPUTE, "dispatch", 0, 10.10, 10.20, 2),
    Span(COMPUTE, "select", 1, 10.21, 10.40, 2),
    Span(COMPUTE, "end", 1, 10.40, 10.50, 2),
    Span(COMPUTE, "dispatch", 0, 10.50, 10.60, 2),
    Span(WAIT, "dispatch", 0, 10.60, 10.70, 2),
    Span(COMPUTE, "end", 0, 10.70, 10.80, 2),
    Span(TRANSFER, "dispatch", 0, 10.10, 10.70, 2, 4096),
)


def in_time(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.start, span.end, span.kind, span.lane, span.name))


# ------------------------------------------------------------------------------------------------ points, hand-offs


def test_points_are_told_from_launches_waits_and_ends() -> None:
    marks = points(STEP)
    assert [(mark.lane, mark.name, mark.at, mark.to, mark.ran_at) for mark in marks] == [
        (0, "dispatch", 10.20, 1, 10.21),
        (1, "select", 10.40, None, None),
    ]


def test_where_transfers_leave_no_doubt_a_numbered_point_is_a_point() -> None:
    assert [mark.name for mark in points([Span(COMPUTE, "layer.3", 0, 1.0, 2.0, 1)])] == ["layer.3"]


def test_the_summary_adds_up() -> None:
    assert handoffs(STEP) == [(10.20, 10.21)]
    summary = summarise([*STEP, Span(TRANSFER, "late", 1, 10.4, 11.0, 2)])
    assert summary.handoff_s == pytest.approx(0.01)
    assert summary.idle_s == pytest.approx(0.2), "after the lanes' end"
    parts = summary.compute_s + summary.exposed_s + summary.handoff_s + summary.idle_s
    assert parts == pytest.approx(summary.wall_s)


def test_perfetto_sees_points_and_what_a_step_was() -> None:
    events: Any = chrome_events(STEP, rank=1, origin=10.0, notes=[NOTE])
    instants = [event for event in events if event["ph"] == "i"]
    assert [(event["name"], event["tid"], event["args"].get("handed_on_to")) for event in instants] == [
        ("dispatch", 2, "lane 1"),
        ("select", 3, None),
    ]
    (step,) = (event for event in events if event.get("cat") == "step")
    assert step["name"] == "step 2: decode, 64 tokens, 2 lanes"
    assert step["args"]["schedule"] == "mlp_shared_overlap"


def test_a_note_in_words() -> None:
    assert describe_note(DECLINED) == "prefill, 3 tokens, unsplit (peer_declined)"
    assert describe_note(replace(NOTE, tokens=1, lanes=1, chunks=4)) == "decode, 1 token, 1 lane x 4 chunks"


# -------------------------------------------------------------------------------------------------- written and read


@given(
    st.lists(
        st.builds(
            lambda kind, lane, start, length, name: Span(
                kind, name, lane, start / 1e9, (start + length) / 1e9, 3, 7 if kind is TRANSFER else 0
            ),
            st.sampled_from(list(SpanKind)),
            st.integers(UNSPLIT, 3),
            st.integers(0, 10**15),
            st.integers(0, 10**10),
            st.sampled_from(["dispatch", "wait for it", "end", "dispatch.0"]),
        ),
        max_size=8,
    )
)
def test_a_file_holds_every_nanosecond(tmp_path_factory: pytest.TempPathFactory, spans: list[Span]) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_chrome(path, {4: spans}, notes={4: [NOTE]}, measures=False, clock=HERE)
    (read,) = read_chrome(path)
    assert (read.rank, read.notes, read.measures) == (4, (NOTE,), False)
    assert (read.clock.host, read.clock.offset_s) == ("here", pytest.approx(1000.0))
    assert in_time(read.spans) == in_time(spans)


def test_a_file_without_spans_keeps_its_rank(tmp_path: Path) -> None:
    write_chrome(tmp_path / "trace.json", {0: [], 1: STEP})
    assert [(rank.rank, len(rank.spans)) for rank in read_chrome(tmp_path / "trace.json")] == [(0, 0), (1, 8)]
    assert Clock.here().host


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ('{"traceEvents": []}', "was not written by this version of ubatch"),
        ("[]", "was not written by this version of ubatch"),
        ('{"traceEvents": [], "otherData": {"ubatch": {"notes": {}}}}', "was not written by this version of ubatch"),
        (
            '{"traceEvents": [], "otherData": {"ubatch": {"host": "h", "unix_s": 1, "origin_s": 0, "measures": true, '
            '"notes": {"0": [{"step": 1, "mode": "decode", "tokens": 1, "schedule": "s", "colour": "red"}]}}}}',
            "colour",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_chrome(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_chrome(tmp_path / "nowhere.json")


# ------------------------------------------------------------------------------------------------------------ merged


def rank(number: int, clock: Clock, begins: float, steps: range, first: float = 0.0) -> RankTrace:
    """Steps of 1 s, 0.1 s apart, of which the one numbered 0 would begin at `begins` + `first`."""
    spans, notes = [], []
    for step in steps:
        start = begins + first + 1.1 * step
        spans.append(Span(COMPUTE, "end", 0, start, start + 1.0, step))
        notes.append(StepNote(step, "decode", 4, "s", lanes=2, start=start, end=start + 1.0))
    return RankTrace(number, tuple(spans), tuple(notes), clock)


def test_ranks_of_one_machine_keep_their_times() -> None:
    merged = merge_traces([rank(1, HERE, 50.2, range(1, 5)), rank(0, HERE, 50.0, range(1, 5))])
    assert [each.rank for each in merged] == [0, 1]
    assert [span.start for span in merged[1].spans] == pytest.approx([51.3, 52.4, 53.5, 54.6])
    assert [span.step for span in merged[1].spans] == [1, 2, 3, 4]


def test_a_rank_that_began_to_record_a_step_later_is_renumbered() -> None:
    late = rank(1, HERE, 50.2, range(1, 9), first=2.2)
    merged = merge_traces([rank(0, HERE, 50.0, range(1, 11)), late])
    assert [span.step for span in merged[1].spans] == list(range(3, 11))
    assert [note.step for note in merged[1].notes] == list(range(3, 11))


def test_other_machines_are_placed_by_the_time_of_day() -> None:
    # Both record at 1050 by the time of day: `there`'s own clock began 4000 s later.
    merged = merge_traces([rank(0, HERE, 50.0, range(1, 9)), rank(1, THERE, -3949.9, range(1, 9))])
    assert merged[1].spans[0].start == pytest.approx(51.2)
    assert merged[1].notes[0].end == pytest.approx(52.2)
    assert merged[1].clock == HERE
    assert [span.step for span in merged[1].spans] == list(range(1, 9))


def test_merging_nothing_and_a_rank_twice() -> None:
    assert merge_traces([]) == []
    with pytest.raises(ConfigError, match="rank 0 comes twice"):
        merge_traces([rank(0, HERE, 0.0, range(1, 3)), rank(0, HERE, 0.0, range(1, 3))])


# ----------------------------------------------------------------------- names of stages, arrows from launches to waits


def names_of(*ends: str, waits: tuple[str, ...] = (), lane: int = 0) -> list[str]:
    """Stages of a lane whose compute ended so, one second each."""
    spans = [Span(COMPUTE, end, lane, float(at), at + 1.0, 1) for at, end in enumerate(ends)]
    names = stage_names([*spans, *(Span(WAIT, name, lane, 90.0, 91.0, 1) for name in waits)])
    return [names[span] for span in spans]


def test_stages_of_a_layer_have_names() -> None:
    ends = ["attn_prepare", "select", "dispatch_counts.0", "dispatch_counts", "dispatch.1", "dispatch", "dispatch"]
    ends += ["combine.2", "combine", "combine", "output", "layer", "attn_prepare", "layer", "end"]
    assert names_of(*ends, waits=("dispatch_counts", "dispatch", "combine")) == [
        "norm, qkv",
        "attention, router",
        "count tokens",
        "after dispatch_counts",
        "pack tokens",
        "after dispatch",
        "after dispatch",
        "experts",
        "after combine",
        "after combine",
        "weighted sum",
        "residual",
        "norm, qkv",
        "attention, dense MLP",
        "after layer",
    ]


def test_other_modules_stages_are_named_by_what_they_follow() -> None:
    assert names_of("all_reduce.0", "mine", "layer", "end", waits=("all_reduce",)) == [
        "start",
        "after all_reduce",
        "after mine",
        "after layer",
    ]
    assert names_of("unsplit", lane=UNSPLIT) == ["unsplit"], "as it was recorded"


def arrows(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Both ends of every arrow."""
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    return [(begins[number], ends[number]) for number in begins]


def enclosing(events: list[dict[str, Any]], end: dict[str, Any]) -> dict[str, Any]:
    """The innermost slice of the event's row at its time, as Perfetto binds it."""
    found = [
        event
        for event in events
        if event["ph"] == "X"
        and (event["pid"], event["tid"]) == (end["pid"], end["tid"])
        and event["ts"] <= end["ts"] < event["ts"] + event["dur"]
    ]
    return min(found, key=lambda event: event["dur"])


def test_arrows_lead_from_the_launch_to_the_wait(tmp_path: Path) -> None:
    def wait(lane: int, at: float, launched: float, launcher: int) -> Span:
        return Span(WAIT, "dispatch", lane, at, at + 1.0, 1, 0, launched, launcher)

    spans = [
        Span(COMPUTE, "select", 0, 0.0, 1.0, 1),
        Span(COMPUTE, "dispatch.0", 0, 1.0, 2.0, 1),
        Span(COMPUTE, "dispatch", 0, 2.0, 3.0, 1),
        Span(COMPUTE, "dispatch.0", 1, 3.0, 4.0, 1),
        wait(1, 5.0, 2.0, 0),  # lane 1 runs lane 0's hook
        wait(0, 7.0, 4.0, 1),
        Span(COMPUTE, "unsplit", UNSPLIT, 10.0, 20.0, 2),
        Span(WAIT, "dispatch", UNSPLIT, 14.0, 15.0, 2, 0, 12.0, UNSPLIT),
        Span(WAIT, "old", 0, 30.0, 31.0, 3),  # recorded without a launch
    ]
    write_chrome(tmp_path / "trace.json", {3: spans, 5: spans})
    for path in (tmp_path / "trace.json", tmp_path / "again.json"):
        events = json.loads(path.read_text())["traceEvents"]
        pairs = arrows(events)
        assert len(pairs) == len({begin["id"] for begin, _ in pairs}) == 6, "of both ranks, with numbers of their own"
        seen = [(enclosing(events, begin), enclosing(events, end)) for begin, end in pairs if begin["pid"] == 3]
        assert [(a["args"]["until"], a["tid"], b["name"], b["tid"]) for a, b in seen] == [
            ("dispatch.0", 2, "wait for dispatch", 3),
            ("dispatch.0", 3, "wait for dispatch", 2),
            ("unsplit", 1, "wait for dispatch", 1),
        ]
        assert all(end["bp"] == "e" and begin["ts"] < end["ts"] for begin, end in pairs)
        write_chrome(tmp_path / "again.json", {rank.rank: rank.spans for rank in merge_traces(read_chrome(path))})


# ------------------------------------------------------------------------------------------------------- notes of steps


@torch.inference_mode()
def test_every_step_has_a_note() -> None:
    thresholds = {"dbo_prefill_token_threshold": 4, "dbo_decode_token_threshold": 6}
    with wrapped(Model().eval(), **thresholds, **FIRST) as wrapper, tracing() as trace:
        wrapper(x_of(6))
        wrapper(x_of(6))
        wrapper(x_of(3))
        with set_forward_context(ForwardContext(num_tokens=5, mode=ForwardMode.DECODE)):
            wrapper(x_of(5))
    assert [(n.step, n.mode, n.tokens, n.schedule, n.lanes, n.chunks, n.reason) for n in trace.notes] == [
        (1, "prefill", 6, "mlp_shared_overlap", 1, 1, "proved"),
        (2, "prefill", 6, "mlp_shared_overlap", 2, 1, None),
        (3, "prefill", 3, "mlp_shared_overlap", 1, 1, "below_prefill_threshold"),
        (4, "decode", 5, "mlp_shared_overlap", 1, 1, "below_decode_threshold"),
    ]
    for note in trace.notes:
        spans = [span for span in trace.spans if span.step == note.step]
        assert spans
        assert all(note.start <= span.start <= span.end <= note.end for span in spans)
    trace.clear()
    assert (trace.notes, trace.step) == ([], 4)


def test_a_step_that_fails_has_none_and_leaves_none() -> None:
    def forward(x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise ValueError("three")
        return x

    with wrapped(Plain(forward), enable_dbo=False) as wrapper, tracing() as trace:
        with pytest.raises(ValueError, match="three"):
            wrapper(x_of(3))
        with traced_step():
            pass
        wrapper(x_of(2))
    assert [(note.step, note.tokens) for note in trace.notes] == [(3, 2)]


def test_the_last_word_counts_and_without_a_trace_there_is_none() -> None:
    note_step("decode", 3, "s")
    note_outcome(lanes=2)
    with traced_step(), tracing() as trace:
        pass
    assert trace.notes == []
    with tracing() as trace:
        note_outcome(lanes=2)
        with traced_step():
            note_step("decode", 3, "s")
            note_outcome(lanes=2)
            note_outcome(reason="cannot_merge", declined_by=1)
    (note,) = trace.notes
    assert note == StepNote(1, "decode", 3, "s", 1, 1, "cannot_merge", 1, note.start, note.end)
