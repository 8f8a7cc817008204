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

from ubatch.errors import ConfigError
from ubatch.process.files import write_whole
from ubatch.trace.export import (
    Interval,
    computing,
    deciding_note,
    describe_note,
    difference,
    intersection,
    lane_name,
    link_name,
    pack,
    summarise,
    union,
)
from ubatch.trace.spans import UNSPLIT, Span, SpanKind, StepNote
from ubatch.trace.stages import Mark, by_lane, by_step, extent, points, stage_names

__all__ = ["Remark", "write_html"]

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


@dataclass(frozen=True)
class _Block:
    """A coloured stretch of a row.

    Attributes:
        name: the stage, of compute; else the transfer.
        until: what ended a stage.
        hidden: the parts of a transfer during which some lane computed.
    """

    kind: SpanKind
    name: str
    until: str
    lane: int
    at: Interval
    hidden: tuple[Interval, ...] = ()
    bytes: int = 0


@dataclass(frozen=True)
class _Row:
    name: str
    blocks: tuple[_Block, ...]
    points: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class _Rank:
    rank: int
    rows: tuple[_Row, ...]
    summary: Mapping[str, float]
    note: str


@dataclass(frozen=True)
class _Step:
    """One step. Times are microseconds since its start on the earliest rank; `start` is since the page's first step."""

    step: int
    start: float
    duration: float
    lanes: int
    ranks: tuple[_Rank, ...]
    note: str


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

    Raises:
        ConfigError: no span has this step.
    """
    steps_of = {rank: by_step(spans) for rank, spans in sorted(traces.items())}
    noted = {(rank, note.step): note for rank, members in (notes or {}).items() for note in members}
    numbers = sorted({number for steps in steps_of.values() for number in steps})
    if step is not None and step not in numbers:
        known = f"steps {numbers[0]} to {numbers[-1]}" if numbers else "no steps"
        raise ConfigError(f"step {step} is not in the trace, which has {known}.")

    every = -(-sum(map(len, traces.values())) // MOST_SPANS)
    kept = [number for index, number in enumerate(numbers) if index % max(every, 1) == 0 or number == step]
    begin = min((span.start for spans in traces.values() for span in spans if span.step in kept), default=0.0)
    pages = [
        _step(
            number,
            {rank: own.get(number, []) for rank, own in steps_of.items() if number in own or (rank, number) in noted},
            noted,
            begin,
        )
        for number in kept
    ]
    first = kept.index(step) if step is not None else _most_telling(pages)
    facts = (
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in (summary or {}).items()
    )
    content = {"steps": [asdict(page) for page in pages], "first": first, "steps_in_all": len(numbers)}
    data = json.dumps(content, separators=(",", ":"))
    slots = {
        "title": html.escape(title),
        "facts": "".join(facts),
        "remarks": "".join(map(_remark, remarks)),
        "table": _table(table),
        "data": data.replace("<", "\\u003c"),  # a "</script>" in a name must not end the element that holds the data
    }
    template = resources.files("ubatch.trace").joinpath("page.html").read_text(encoding="utf-8")
    # One pass, so that text in a value is not replaced.
    write_whole(Path(path), re.sub(r"\{\{(\w+)\}\}", lambda slot: slots[slot[1]], template))


def _remark(remark: Remark) -> str:
    kind = html.escape(remark.kind)
    return f'<li class="{kind}"><b>{kind}</b> {html.escape(remark.text)}</li>'


def _table(rows: Sequence[Sequence[str]]) -> str:
    """An HTML table. The first row is the heading; the first cell of every row is the row's heading."""
    made = [
        "".join(f"<{cell}>{html.escape(text)}</{cell}>" for text in row)
        for cell, row in zip(["th", *["td"] * len(rows)], rows, strict=False)
    ]
    return f"<thead><tr>{made[0]}</tr></thead><tbody><tr>{'</tr><tr>'.join(made[1:])}</tr></tbody>" if made else ""


def _step(
    number: int, spans_of: Mapping[int, Sequence[Span]], notes: Mapping[tuple[int, int], StepNote], begin: float
) -> _Step:
    noted = {rank: notes[rank, number] for rank in spans_of if (rank, number) in notes}
    every = [span for spans in spans_of.values() for span in spans]
    origin, end = extent(every)
    return _Step(
        step=number,
        start=_micros(origin - begin),
        duration=_micros(end - origin),
        lanes=len({span.lane for span in every if span.lane != UNSPLIT}),
        ranks=tuple(_rank(rank, spans, origin, notes.get((rank, number))) for rank, spans in spans_of.items()),
        note=describe_note(deciding_note(noted), *noted.values()) if noted else "",
    )


def _rank(rank: int, recorded: Sequence[Span], origin: float, note: StepNote | None) -> _Rank:
    """One rank's rows in one step: its lanes, then the link."""
    spans = [
        replace(span, start=_micros(span.start - origin), end=_micros(span.end - origin))
        for span in sorted(recorded, key=lambda span: span.start)
    ]
    busy = computing(spans)
    waiting = union((span.start, span.end) for span in spans if span.kind is SpanKind.WAIT)
    stages = stage_names(spans)
    marks = points(spans)

    def blocks(span: Span) -> Iterator[_Block]:
        """Blocks of a span: a wait or a transfer unchanged; a compute span without the waits inside it."""
        whole = [(span.start, span.end)]
        hidden = tuple(intersection(busy, whole)) if span.kind is SpanKind.TRANSFER else ()
        for at in difference(whole, waiting) if span.kind is SpanKind.COMPUTE else whole:
            yield _Block(span.kind, stages.get(span, span.name), span.name, span.lane, at, hidden, span.bytes)

    def row(name: str, of_row: Sequence[Span], lane: int | None = None) -> _Row:
        drawn = tuple(block for span in of_row for block in blocks(span))
        return _Row(name, drawn, tuple(mark for mark in marks if mark.lane == lane))

    of_lanes = by_lane(span for span in spans if span.kind is not SpanKind.TRANSFER)
    lanes = [row(lane_name(lane), own, lane) for lane, own in sorted(of_lanes.items())]
    transfers = pack(span for span in spans if span.kind is SpanKind.TRANSFER)
    links = [row(link_name(link), own) for link, own in enumerate(transfers)]
    summary = {name.removesuffix("_s"): _micros(seconds) for name, seconds in asdict(summarise(recorded)).items()}
    return _Rank(rank, (*lanes, *links), summary, "" if note is None else describe_note(note))


def _most_telling(pages: Sequence[_Step]) -> int:
    """Index of the overlapped step of median length; of all steps if none overlapped."""
    overlapped = [position for position, page in enumerate(pages) if page.lanes > 0]
    candidates = sorted(overlapped or range(len(pages)), key=lambda position: pages[position].duration)
    return candidates[len(candidates) // 2] if candidates else 0


def _micros(seconds: float) -> float:
    """Seconds as microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)
