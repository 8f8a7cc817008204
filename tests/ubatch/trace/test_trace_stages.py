"""Names of stages, and arrows from launches to waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ubatch.trace.export import write_chrome
from ubatch.trace.file import merge_traces, read_chrome
from ubatch.trace.spans import UNSPLIT, Span, SpanKind
from ubatch.trace.stages import stage_names

COMPUTE, WAIT = SpanKind.COMPUTE, SpanKind.WAIT


def names_of(*ends: str, waits: tuple[str, ...] = (), lane: int = 0) -> list[str]:
    """Stages of a lane whose compute ended so, one second each."""
    spans = [Span(COMPUTE, end, lane, float(at), at + 1.0, 1) for at, end in enumerate(ends)]
    names = stage_names([*spans, *(Span(WAIT, name, lane, 90.0, 91.0, 1) for name in waits)])
    return [names[span] for span in spans]


def test_stages_of_a_layer_have_names() -> None:
    ends = ["attn_prepare", "select", "dispatch_counts.0", "dispatch_counts", "dispatch.1", "dispatch", "dispatch"]
    ends += ["combine.2", "combine", "combine", "output", "layer", "attn_prepare", "layer", "end"]
    names = names_of(*ends, waits=("dispatch_counts", "dispatch", "combine"))
    assert names == [
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
