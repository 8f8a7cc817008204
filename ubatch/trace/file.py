"""Reading the trace files of ranks, and converting them to one clock.

Ranks of one machine share `time.monotonic`, so their spans need no conversion. Between machines the time of day is
used, which is as exact as the machines' clock synchronisation.

Every rank counts its steps from the start of its recording, which may be a step earlier or later than on another rank.
Ranks that share experts run their steps at the same time, so the steps that overlap most are the same step.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ubatch.errors import ConfigError
from ubatch.trace.export import FILE_KEY, WAIT_PREFIX, Clock, lane_row
from ubatch.trace.spans import UNSPLIT, Span, SpanKind, StepNote
from ubatch.trace.stages import by_step, extent

_Record = TypeVar("_Record", Span, StepNote)


@dataclass(frozen=True)
class RankTrace:
    """One rank's recorded trace.

    Attributes:
        spans: sorted by time; in seconds of `clock`.
        notes: one note per step.
        clock: its machine's clock.
        measures: True if a span is the time of the work itself, False if it is the time in which the host queued it.
        extra: what else was recorded, by name.
    """

    rank: int
    spans: tuple[Span, ...]
    notes: tuple[StepNote, ...]
    clock: Clock
    measures: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)


def read_chrome(path: str | Path) -> list[RankTrace]:
    """The ranks in a file of `write_chrome`. Times are exact to the nanosecond.

    Raises:
        ConfigError: the file cannot be read, or was not written by `write_chrome`.
    """
    try:
        document: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    try:
        about = document["otherData"][FILE_KEY]
        clock = Clock(str(about["host"]), about["unix_s"] - about["origin_s"])
        spans = _spans(document["traceEvents"], round(about["origin_s"] * 1e9))
        notes = {int(rank): tuple(StepNote(**note) for note in own) for rank, own in about["notes"].items()}
        measures = bool(about["measures"])
        extra = {int(rank): own for rank, own in about.get("extra", {}).items()}
        return [
            RankTrace(rank, tuple(spans.get(rank, ())), own, clock, measures, extra.get(rank, {}))
            for rank, own in notes.items()
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} was not written by this version of ubatch: {error!r}. Record it again.") from error


def merge_traces(traces: Iterable[RankTrace]) -> list[RankTrace]:
    """The traces sorted by rank, converted to the clock and step numbers of the lowest rank.

    Raises:
        ConfigError: a rank occurs twice.
    """
    ranks = sorted(traces, key=lambda trace: trace.rank)
    for first, second in itertools.pairwise(ranks):
        if first.rank == second.rank:
            raise ConfigError(f"rank {first.rank} comes twice. Give one file per rank, of one recording.")
    if not ranks:
        return []
    reference, *others = ranks
    merged = [reference]
    for trace in others:
        late = 0.0 if trace.clock.host == reference.clock.host else trace.clock.offset_s - reference.clock.offset_s
        placed = replace(_moved(trace, late, 0), clock=reference.clock)
        merged.append(_moved(placed, 0.0, _lag(reference, placed)))
    return merged


def _spans(events: Sequence[Mapping[str, Any]], origin_ns: int) -> dict[int, list[Span]]:
    """Rank to spans."""
    kinds = {str(kind): kind for kind in SpanKind}
    spans: dict[int, list[Span]] = {}
    for event in events:
        kind = kinds.get(event.get("cat", "")) if event["ph"] == "X" else None
        if kind is None:
            continue
        args = event["args"]
        lane = args["lane_number"] if kind is SpanKind.TRANSFER else event["tid"] - lane_row(0)
        name = event["name"].removeprefix(WAIT_PREFIX) if kind is SpanKind.WAIT else args.get("until", event["name"])
        start = origin_ns + round(event["ts"] * 1e3)
        end = start + round(event["dur"] * 1e3)
        launched = (origin_ns + round(args["launched_us"] * 1e3)) / 1e9 if "launched_us" in args else 0.0
        more = args.get("bytes", 0), launched, args.get("launcher", UNSPLIT), args.get("layer", "")
        span = Span(kind, name, max(lane, UNSPLIT), start / 1e9, end / 1e9, args["step"], *more)
        spans.setdefault(event["pid"], []).append(span)
    return spans


def _moved(trace: RankTrace, later_s: float, steps: int) -> RankTrace:
    if not later_s and not steps:
        return trace

    def moved(record: _Record) -> _Record:
        return replace(record, start=record.start + later_s, end=record.end + later_s, step=record.step + steps)

    spans = (replace(moved(span), launched=span.launched and span.launched + later_s) for span in trace.spans)
    return replace(trace, spans=tuple(spans), notes=tuple(map(moved, trace.notes)))


def _lag(reference: RankTrace, trace: RankTrace) -> int:
    """How many steps later than the reference this rank began to count."""
    known = sorted((*extent(spans), step) for step, spans in by_step(reference.spans).items())
    lags: Counter[int] = Counter()
    for step, spans in by_step(trace.spans).items():
        middle = sum(extent(spans)) / 2
        at = bisect.bisect_right(known, middle, key=lambda each: each[0]) - 1
        if at >= 0 and middle <= known[at][1]:
            lags[known[at][2] - step] += 1
    return min(lags, key=lambda lag: (-lags[lag], abs(lag)), default=0)
