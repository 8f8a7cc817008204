"""Export of a trace: a summary of where the time went, and a file for Perfetto.

All figures are computed from three sets of time intervals:

    computing      some lane holds the baton and runs
    waiting        some lane holds the baton and waits for a transfer, so no lane computes
    on the link    some transfer is in flight

Communication is hidden while `computing` and `on the link` overlap, and exposed while a lane waits. If no lane computes
or waits, the baton is between two lanes (a hand-off), or the step is idle: before and after its lanes run.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ubatch.process.files import write_whole
from ubatch.process.machine import machine_name
from ubatch.trace.intervals import Interval, computing, difference, intersection, lasting, measure, union
from ubatch.trace.spans import UNSPLIT, Span, SpanKind, StepNote
from ubatch.trace.stages import by_step, extent, flows, held_by_lanes, points, stage_names

_STEP_ROW = 0
_FIRST_LINK_ROW = 1000
"""Chrome's thread numbers: steps, then lanes from 1 on, then the link."""
WAIT_PREFIX = "wait for "
FILE_KEY = "ubatch"
"""Key under `otherData` for data that only `ubatch.trace.file` reads."""


@dataclass(frozen=True)
class TraceSummary:
    """Where the time of some steps of one rank went, in seconds.

    Attributes:
        compute_s: some lane computed.
        communication_s: some transfer was on the link.
        hidden_s: both at once.
        exposed_s: a lane held the baton and waited for a transfer.
        wall_s: from the first to the last span of every step; time between steps does not count.
        handoff_s: the baton was on its way from one lane to another.
        idle_s: the rest of `wall_s`.
    """

    compute_s: float
    communication_s: float
    hidden_s: float
    exposed_s: float
    wall_s: float
    handoff_s: float = 0.0
    idle_s: float = 0.0

    @property
    def hidden_fraction(self) -> float:
        """The share of communication that was hidden, 0 to 1; 1 where there was none."""
        return self.hidden_s / self.communication_s if self.communication_s > 0 else 1.0


def summarise(spans: Iterable[Span]) -> TraceSummary:
    """Where the time of one rank went. A wait counts as wait even inside a compute span."""
    spans = tuple(spans)
    busy, waiting, on_link = computing(spans), lasting(spans, SpanKind.WAIT), lasting(spans, SpanKind.TRANSFER)
    held = union([*busy, *waiting])
    steps = [extent(step) for step in by_step(spans).values()]
    handed = difference(handoffs(spans), held)
    return TraceSummary(
        compute_s=measure(busy),
        communication_s=measure(on_link),
        hidden_s=measure(intersection(busy, on_link)),
        exposed_s=measure(waiting),
        wall_s=measure(steps),
        handoff_s=measure(handed),
        idle_s=measure(difference(union(steps), union([*held, *handed]))),
    )


def handoffs(spans: Iterable[Span]) -> list[Interval]:
    """Intervals in which the baton was between two lanes of one rank: one had ended its turn, the next had not
    begun."""
    steps = [held_by_lanes(step) for step in by_step(spans).values()]
    pairs = itertools.chain.from_iterable(map(itertools.pairwise, steps))
    return union((before.end, after.start) for before, after in pairs if before.lane != after.lane)


@dataclass(frozen=True)
class Clock:
    """Relation between a machine's `time.monotonic` and the time of day.

    Attributes:
        host: identifier of the machine, new after a reboot.
        offset_s: the time of day (seconds since 1970) where `time.monotonic` is 0.
    """

    host: str
    offset_s: float

    @staticmethod
    def here() -> Clock:
        """The clock of this machine."""
        return Clock(machine_name(), time.time() - time.monotonic())


def chrome_events(
    spans: Sequence[Span], *, rank: int, origin: float, notes: Iterable[StepNote] = ()
) -> list[dict[str, object]]:
    """A rank's trace as Chrome's events, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

    The rank is a process; its rows are the steps, the lanes and the link. Transfers in flight at the same time get one
    link row each. A lane's slices have the names of its stages. Points are instants in the lanes' rows; an arrow leads
    from each launch to the wait for it.

    Args:
        spans: of one rank.
        rank: the process number.
        origin: the `time.monotonic` that becomes 0.
        notes: one note per step.

    Returns:
        The `traceEvents` of a file, with times in microseconds.
    """
    draw = _Draw(rank, origin)
    noted = {note.step: note for note in notes}
    steps = by_step(spans)
    events: list[dict[str, object]] = []
    for step, members in sorted(steps.items()):
        what: dict[str, object] = {"step": step}
        title = f"step {step}"
        if step in noted:
            what |= {key: value for key, value in asdict(noted[step]).items() if key not in ("start", "end")}
            title += f": {describe_note(noted[step])}"
        events.append(draw.slice(title, "step", _STEP_ROW, extent(members), what))

    rows = {_STEP_ROW: "steps"}
    busy = {step: computing(members) for step, members in steps.items()}
    transfers = [span for span in spans if span.kind is SpanKind.TRANSFER]
    links = {id(span): link for link, row in enumerate(pack(transfers)) for span in row}
    stages = stage_names(spans)
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        args: dict[str, object] = {"step": span.step}
        if span.kind is SpanKind.TRANSFER:
            link = links[id(span)]
            row = _FIRST_LINK_ROW + link
            rows[row] = link_name(link)
            args |= {"lane": lane_name(span.lane), "lane_number": span.lane, "bytes": span.bytes}
            args["hidden_us"] = measure(intersection(busy[span.step], [(span.start, span.end)])) * 1e6
        else:
            row = lane_row(span.lane)
            rows[row] = lane_name(span.lane)
        name = f"{WAIT_PREFIX}{span.name}" if span.kind is SpanKind.WAIT else stages.get(span, span.name)
        if span.kind is SpanKind.COMPUTE:
            args["until"] = span.name
            if span.layer:
                args["layer"] = span.layer
        elif span.launched:
            args |= {"launched_us": draw.ns(span.launched) / 1e3, "launcher": span.launcher}
        events.append(draw.slice(name, str(span.kind), row, (span.start, span.end), args))

    for mark in points(spans):
        args = {"step": mark.step} | ({} if mark.to is None else {"handed_on_to": lane_name(mark.to)})
        events.append(draw.event("i", mark.name, "point", lane_row(mark.lane), mark.at, s="t", args=args))
    for number, (launcher, at, wait) in enumerate(flows(spans), rank << 32):  # its ends lie in slices of their times
        events.append(draw.event("s", wait.name, "launch", lane_row(launcher), at, id=number))
        events.append(draw.event("f", wait.name, "launch", lane_row(wait.lane), wait.start, id=number, bp="e"))

    names = _named("process", rank, 0, f"rank {rank}", rank)
    for row, name in sorted(rows.items()):
        names += _named("thread", rank, row, name, row)
    return names + events


def write_chrome(
    path: str | Path,
    traces: Mapping[int, Sequence[Span]],
    *,
    notes: Mapping[int, Sequence[StepNote]] | None = None,
    measures: bool = True,
    clock: Clock | None = None,
    extra: Mapping[int, Mapping[str, object]] | None = None,
    new: bool = False,
) -> None:
    """Write the traces of all ranks into one Chrome JSON file, which `read_chrome` reads, too.

    Args:
        path: the file; replaced if it exists.
        traces: rank to spans. The ranks must share a clock, that is, run on one machine; or see `ubatch.trace.file`.
        notes: rank to the notes of its steps.
        measures: True if a span is the time of the work itself, False if it is the time in which the host queued it.
        clock: of the machine that `traces` were recorded on; this one's by default.
        extra: rank to what else was recorded, by name; anything that JSON can have.
        new: raise FileExistsError if the file exists.
    """
    notes = notes or {}
    clock = clock or Clock.here()
    origin = min((span.start for spans in traces.values() for span in spans), default=0.0)
    events: list[object] = []
    for rank, spans in sorted(traces.items()):
        events += chrome_events(spans, rank=rank, origin=origin, notes=notes.get(rank, ()))
    about = {
        "host": clock.host,
        "origin_s": origin,
        "unix_s": origin + clock.offset_s,
        "measures": measures,
        "notes": {str(rank): [asdict(note) for note in notes.get(rank, ())] for rank in sorted(traces)},
        "extra": {str(rank): own for rank, own in (extra or {}).items() if own},
    }
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {FILE_KEY: about}}
    write_whole(Path(path), json.dumps(document, separators=(",", ":")), new=new)


def deciding_note(notes: Mapping[int, StepNote]) -> StepNote:
    """Of one step's notes by rank: that of the first rank that declined overlap, as one rank declines for all; else
    that of the rank with the fewest tokens, not counting ranks without any."""
    decliners = (note.declined_by for note in notes.values())
    declined = next((notes[rank] for rank in decliners if rank is not None and rank in notes), None)
    return declined or min(notes.values(), key=lambda note: (not note.tokens, note.tokens))


def describe_note(note: StepNote, *others: StepNote) -> str:
    """`decode, 64 tokens, 2 lanes`, or `decode, 3-5 tokens, unsplit (below_decode_threshold)` if ranks differ.

    Args:
        note: of the deciding rank (`deciding_note`).
        others: of the other ranks.
    """
    outcome = describe_outcome(note.lanes, note.chunks, note.reason)
    tokens = [each.tokens for each in (note, *others) if each.tokens] or [0]
    few, many = min(tokens), max(tokens)
    return f"{note.mode}, {few if few == many else f'{few}-{many}'} token{'s' * (many != 1)}, {outcome}"


def describe_outcome(lanes: int, chunks: int, reason: str | None) -> str:
    """`2 lanes`, `1 lane x 2 chunks`, or `unsplit (below_decode_threshold)`."""
    if reason is not None:
        return f"unsplit ({reason})"
    return f"{lanes} lane{'s' * (lanes != 1)}" + (f" x {chunks} chunks" if chunks > 1 else "")


def lane_row(lane: int) -> int:
    """A lane's thread number in Chrome's format; work outside lanes has the number before lane 0's."""
    return lane + 2


def lane_name(lane: int) -> str:
    """Name of a lane's row."""
    return "unsplit" if lane == UNSPLIT else f"lane {lane}"


def link_name(link: int) -> str:
    """Name of a link row; there are several if transfers overlap."""
    return "link" if link == 0 else f"link ({link + 1})"


def pack(transfers: Iterable[Span]) -> list[list[Span]]:
    """Transfers in as few rows as possible, so that those in one row do not overlap."""
    rows: list[list[Span]] = []
    for span in sorted(transfers, key=lambda span: (span.start, span.end)):
        row = next((row for row in rows if row[-1].end <= span.start), None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return rows


@dataclass(frozen=True)
class _Draw:
    """Makes the events of one rank."""

    rank: int
    origin: float

    def ns(self, at: float) -> int:
        """Time on Chrome's clock, in nanoseconds."""
        return round((at - self.origin) * 1e9)

    def event(self, phase: str, name: str, category: str, row: int, at: float, **more: object) -> dict[str, object]:
        """An event of any phase, with the fields that only this phase has."""
        event = {"ph": phase, "name": name, "cat": category, "pid": self.rank, "tid": row, "ts": self.ns(at) / 1e3}
        return event | more

    def slice(self, name: str, category: str, row: int, at: Interval, args: Mapping[str, object]) -> dict[str, object]:
        """A complete event. Both ends are rounded to nanoseconds, so that nested spans stay nested."""
        start, end = at
        duration = (self.ns(end) - self.ns(start)) / 1e3
        return self.event("X", name, category, row, start, dur=duration, args=args)


def _named(what: str, rank: int, row: int, name: str, place: int) -> list[dict[str, object]]:
    """The name of a process or thread, and its place among the others."""
    told = {"name": name, "sort_index": place}
    return [{"ph": "M", "name": f"{what}_{key}", "pid": rank, "tid": row, "args": {key: told[key]}} for key in told]
