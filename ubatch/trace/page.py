"""A trace as one HTML page: when lanes computed, transfers ran, and lanes waited.

This file decides what is drawn in which row; `page.html` draws it. The page is self-contained.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from ubatch.errors import ConfigError
from ubatch.process.files import write_whole
from ubatch.trace.export import deciding_note, describe_note, lane_name, link_name, pack, summarise
from ubatch.trace.intervals import Interval, computing, difference, intersection, lasting
from ubatch.trace.spans import UNSPLIT, Span, SpanKind, StepNote
from ubatch.trace.stages import by_lane, by_step, extent, points, stage_names

MOST_SPANS = 150_000
"""Limit for one page: with more (some 15 MB) it is slow to open."""


@dataclass(frozen=True)
class Remark:
    """A sentence to show above the timeline.

    Attributes:
        kind: one word in front of it: `problem`, `hint` and `good` have a colour.
        text: the sentence.
    """

    kind: str
    text: str


_Steps = Mapping[int, Mapping[int, Sequence[Span]]]
"""Rank -> step -> its spans."""
_Json = dict[str, Any]
"""What the page's script reads. Times are microseconds since the step's start on the earliest rank; a step's `start` is
since the page's first step.

    step     step, start, duration, lanes, ranks, note
    rank     rank, rows, summary, note
    row      name, blocks, points (`Mark`)
    block    kind, name (the stage, of compute; else the transfer), until (what ended a stage), lane, at, bytes,
             hidden (the parts of a transfer during which some lane computed)
"""


def write_html(
    path: str | Path,
    traces: Mapping[int, Sequence[Span]],
    *,
    title: str = "ubatch timeline",
    summary: Mapping[str, str] | None = None,
    step: int | None = None,
    notes: Mapping[int, Sequence[StepNote]] | None = None,
    remarks: Sequence[Remark] = (),
    table: Sequence[Sequence[str]] = (),
    sections: Sequence[str] = (),
) -> None:
    """Write the traces of all ranks as a self-contained page.

    Every lane and the link are rows. A transfer has one colour while some lane computed and another while none did;
    points and hand-offs are marked on the lanes. The page has controls for the steps: from which one on, and how many.
    For a very long trace it has only every n-th step, and says so.

    Args:
        path: the file; replaced if it exists.
        traces: rank to spans. The ranks must share a clock, that is, run on one machine.
        title: the heading.
        summary: facts to show below it, such as the model or the measured speed-up.
        step: the step shown first; by default the overlapped step of median length.
        notes: rank to the notes of its steps.
        remarks: sentences about all steps.
        table: figures of all steps; the first row is the heading.
        sections: more to show, as HTML; without `traces` there is nothing else below the facts.

    Raises:
        ConfigError: no span has this step.
    """
    facts = summary or {}
    slots = {
        "title": html.escape(title),
        "facts": "".join(f"<div>{_tags('dt', name)}{_tags('dd', value)}</div>" for name, value in facts.items()),
        "remarks": "".join(map(_remark, remarks)),
        "table": f"<thead>{_rows('th', table[:1])}</thead><tbody>{_rows('td', table[1:])}</tbody>" if table else "",
        "sections": "".join(f'<section class="card more">{section}</section>' for section in sections),
        # a "</script>" in a name must not end the element that holds the data
        "data": json.dumps(_data(traces, notes or {}, step), separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = resources.files("ubatch.trace").joinpath("page.html").read_text(encoding="utf-8")
    # One pass, so that text in a value is not replaced.
    write_whole(Path(path), re.sub(r"\{\{(\w+)\}\}", lambda slot: slots[slot[1]], template))


def _tags(tag: str, *texts: str) -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)


def _remark(remark: Remark) -> str:
    return f'<li class="{html.escape(remark.kind)}">{_tags("b", remark.kind)} {html.escape(remark.text)}</li>'


def _rows(cell: str, rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"<tr>{_tags(cell, *row)}</tr>" for row in rows)


# -------------------------------------------------------------------------------------------- what the script reads


def _data(traces: Mapping[int, Sequence[Span]], notes: Mapping[int, Sequence[StepNote]], step: int | None) -> _Json:
    """The steps that the page has, and which of them comes up first."""
    steps_of = {rank: by_step(spans) for rank, spans in sorted(traces.items())}
    noted = {(rank, note.step): note for rank, members in notes.items() for note in members}
    numbers = sorted({number for steps in steps_of.values() for number in steps})
    if step is not None and step not in numbers:
        known = f"steps {numbers[0]} to {numbers[-1]}" if numbers else "no steps"
        raise ConfigError(f"step {step} is not in the trace, which has {known}.")
    every = max(1, -(-sum(map(len, traces.values())) // MOST_SPANS))
    kept = [number for index, number in enumerate(numbers) if index % every == 0 or number == step]
    begin = min((span.start for spans in traces.values() for span in spans if span.step in kept), default=0.0)
    pages = [_step(number, steps_of, noted, begin) for number in kept]
    first = kept.index(step) if step is not None else _most_telling(pages)
    return {"steps": pages, "first": first, "steps_in_all": len(numbers)}


def _step(number: int, steps_of: _Steps, notes: Mapping[tuple[int, int], StepNote], begin: float) -> _Json:
    """A step on all ranks that recorded it: its spans, or only a note."""
    noted = {rank: notes[rank, number] for rank in steps_of if (rank, number) in notes}
    spans_of = {rank: own.get(number, []) for rank, own in steps_of.items() if number in own or rank in noted}
    every = [span for spans in spans_of.values() for span in spans]
    origin, end = extent(every)
    return {
        "step": number,
        "start": _micros(origin - begin),
        "duration": _micros(end - origin),
        "lanes": len({span.lane for span in every if span.lane != UNSPLIT}),
        "ranks": [_rank(rank, spans, origin, noted.get(rank)) for rank, spans in spans_of.items()],
        "note": describe_note(deciding_note(noted), *noted.values()) if noted else "",
    }


def _rank(rank: int, recorded: Sequence[Span], origin: float, note: StepNote | None) -> _Json:
    """One rank's rows in one step: its lanes, then the link."""
    spans = [
        replace(span, start=_micros(span.start - origin), end=_micros(span.end - origin))
        for span in sorted(recorded, key=lambda span: span.start)
    ]
    busy, waiting = computing(spans), lasting(spans, SpanKind.WAIT)
    stages, marks = stage_names(spans), points(spans)

    def row(name: str, of_row: Sequence[Span], lane: int | None = None) -> _Json:
        blocks = [block for span in of_row for block in _blocks(span, stages.get(span, span.name), busy, waiting)]
        return {"name": name, "blocks": blocks, "points": [asdict(mark) for mark in marks if mark.lane == lane]}

    of_lanes = by_lane(span for span in spans if span.kind is not SpanKind.TRANSFER)
    rows = [row(lane_name(lane), own, lane) for lane, own in sorted(of_lanes.items())]
    transfers = pack(span for span in spans if span.kind is SpanKind.TRANSFER)
    rows += [row(link_name(link), own) for link, own in enumerate(transfers)]
    summary = {name.removesuffix("_s"): _micros(seconds) for name, seconds in asdict(summarise(recorded)).items()}
    return {"rank": rank, "rows": rows, "summary": summary, "note": "" if note is None else describe_note(note)}


def _blocks(span: Span, name: str, busy: Sequence[Interval], waiting: Sequence[Interval]) -> Iterator[_Json]:
    """A wait or a transfer is one block; a compute span is one per stretch between the waits inside it."""
    whole = [(span.start, span.end)]
    hidden = intersection(busy, whole) if span.kind is SpanKind.TRANSFER else []
    for at in difference(whole, waiting) if span.kind is SpanKind.COMPUTE else whole:
        told = {"kind": span.kind, "name": name, "until": span.name, "lane": span.lane}
        yield told | {"hidden": hidden, "bytes": span.bytes, "at": at}


def _most_telling(pages: Sequence[_Json]) -> int:
    """Index of the overlapped step of median length; of all steps if none overlapped."""
    overlapped = [position for position, page in enumerate(pages) if page["lanes"]]
    candidates = sorted(overlapped or range(len(pages)), key=lambda position: pages[position]["duration"])
    return candidates[len(candidates) // 2] if candidates else 0


def _micros(seconds: float) -> float:
    """Seconds as microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)
