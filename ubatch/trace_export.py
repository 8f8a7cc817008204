"""What a trace says: where the time went, and a file that Perfetto opens.

Three sets of moments answer every question here:

    computing      some lane holds the baton and runs
    waiting        some lane holds the baton and waits for a transfer, so nobody computes
    on the link    some transfer is under way

Communication is hidden where `computing` and `on the link` meet, and exposed where a lane waits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ubatch.trace import UNSPLIT, Span, SpanKind

__all__ = ["TraceSummary", "summarise", "to_chrome", "write_chrome"]

Interval = tuple[float, float]

_STEP_ROW = 0
_FIRST_LINK_ROW = 1000
"""Chrome's thread numbers: steps, then lanes from 1 on, then the link."""


@dataclass(frozen=True)
class TraceSummary:
    """Where the time of some steps of one rank went, in seconds.

    Attributes:
        compute_s: some lane computed.
        communication_s: some transfer was on the link.
        hidden_s: both at once.
        exposed_s: a lane held the baton and waited for a transfer.
        wall_s: from the first to the last span of every step; time between steps does not count.
    """

    compute_s: float
    communication_s: float
    hidden_s: float
    exposed_s: float
    wall_s: float

    @property
    def hidden_fraction(self) -> float:
        """The share of communication that was hidden, 0 to 1; 1 where there was none."""
        return self.hidden_s / self.communication_s if self.communication_s > 0 else 1.0


def summarise(spans: Iterable[Span]) -> TraceSummary:
    """Where the time of one rank went. A wait counts as wait even inside a compute span."""
    spans = tuple(spans)
    on_link = union((span.start, span.end) for span in spans if span.kind is SpanKind.TRANSFER)
    busy = computing(spans)
    waiting = union((span.start, span.end) for span in spans if span.kind is SpanKind.WAIT)
    return TraceSummary(
        compute_s=measure(busy),
        communication_s=measure(on_link),
        hidden_s=measure(intersection(busy, on_link)),
        exposed_s=measure(waiting),
        wall_s=sum(
            max(span.end for span in step) - min(span.start for span in step) for step in by_step(spans).values()
        ),
    )


def to_chrome(spans: Sequence[Span], *, rank: int = 0, origin: float | None = None) -> dict[str, object]:
    """A trace as Chrome's JSON object, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

    The rank is a process; its rows are the steps, the lanes and the link. Transfers that were under way at the same
    time get a link row each.

    Args:
        spans: of one rank.
        rank: the process number.
        origin: the `time.monotonic` that becomes 0; the earliest span by default.

    Returns:
        `{"traceEvents": [...], "displayTimeUnit": "ms"}` with times in microseconds.
    """
    if origin is None:
        origin = min((span.start for span in spans), default=0.0)
    steps = by_step(spans)
    busy = {step: computing(members) for step, members in steps.items()}
    transfers = [span for span in spans if span.kind is SpanKind.TRANSFER]
    links = {id(span): link for link, row in enumerate(pack(transfers)) for span in row}

    rows = {_STEP_ROW: "steps"}
    events: list[dict[str, object]] = []
    for step, members in sorted(steps.items()):
        start, end = min(span.start for span in members), max(span.end for span in members)
        events.append(_event(f"step {step}", "step", rank, _STEP_ROW, start - origin, end - origin, {"step": step}))
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        args: dict[str, object] = {"step": span.step}
        if span.kind is SpanKind.TRANSFER:
            link = links[id(span)]
            row = _FIRST_LINK_ROW + link
            rows[row] = link_name(link)
            hidden = measure(intersection(busy[span.step], [(span.start, span.end)]))
            args |= {"lane": lane_name(span.lane), "bytes": span.bytes, "hidden_us": hidden * 1e6}
        else:
            row = span.lane + 2
            rows[row] = lane_name(span.lane)
        name = f"wait for {span.name}" if span.kind is SpanKind.WAIT else span.name
        events.append(_event(name, str(span.kind), rank, row, span.start - origin, span.end - origin, args))

    names: list[dict[str, object]] = [
        _metadata("process_name", rank, 0, name=f"rank {rank}"),
        _metadata("process_sort_index", rank, 0, sort_index=rank),
    ]
    for row, name in sorted(rows.items()):
        names.append(_metadata("thread_name", rank, row, name=name))
        names.append(_metadata("thread_sort_index", rank, row, sort_index=row))
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def write_chrome(path: str | Path, traces: Mapping[int, Sequence[Span]]) -> None:
    """Write the traces of all ranks into one Chrome JSON file.

    Args:
        path: the file; replaced if it exists.
        traces: rank to spans. The ranks must share a clock, that is, run on one machine.
    """
    origin = min((span.start for spans in traces.values() for span in spans), default=0.0)
    events: list[object] = []
    for rank, spans in sorted(traces.items()):
        one = to_chrome(spans, rank=rank, origin=origin)["traceEvents"]
        events += one if isinstance(one, list) else []
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    Path(path).write_text(text, encoding="utf-8")


def lane_name(lane: int) -> str:
    """What a lane's row is called."""
    return "unsplit" if lane == UNSPLIT else f"lane {lane}"


def link_name(link: int) -> str:
    """What a link row is called; there is more than one where transfers overlap."""
    return "link" if link == 0 else f"link ({link + 1})"


def by_step(spans: Iterable[Span]) -> dict[int, list[Span]]:
    """The spans of every step."""
    steps: dict[int, list[Span]] = {}
    for span in spans:
        steps.setdefault(span.step, []).append(span)
    return steps


def pack(transfers: Iterable[Span]) -> list[list[Span]]:
    """Transfers in as few rows as possible, so that those in one row do not overlap."""
    rows: list[list[Span]] = []
    for span in sorted(transfers, key=lambda span: (span.start, span.end)):
        for row in rows:
            if row[-1].end <= span.start:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


def computing(spans: Iterable[Span]) -> list[Interval]:
    """When some lane computed."""
    spans = tuple(spans)
    held = union((span.start, span.end) for span in spans if span.kind is SpanKind.COMPUTE)
    waiting = union((span.start, span.end) for span in spans if span.kind is SpanKind.WAIT)
    return difference(held, waiting)


# Sets of moments, as sorted, disjoint intervals.


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments that lie in any of the intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The moments that lie in both."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The moments that lie in the first but not in the second."""
    if not first:
        return []
    edges = [first[0][0], *(edge for interval in second for edge in interval), first[-1][1]]
    outside = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
    return intersection(first, outside)


def measure(intervals: Iterable[Interval]) -> float:
    """How long they are together, in seconds."""
    return sum(end - start for start, end in intervals)


def _event(
    name: str, category: str, rank: int, row: int, start: float, end: float, args: Mapping[str, object]
) -> dict[str, object]:
    """A complete event. Both ends are rounded to nanoseconds, so that nested spans stay nested."""
    start_ns, end_ns = round(start * 1e9), round(end * 1e9)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": rank,
        "tid": row,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": dict(args),
    }


def _metadata(what: str, rank: int, row: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": rank, "tid": row, "args": args}
