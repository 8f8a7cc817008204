"""The steps of a trace, over all ranks: their kind, where their time went, and whether overlapped ones were faster.

An overlapped step is compared with unsplit steps of its mode and of like size, if the trace has some. Otherwise it is
compared with the serial estimate: its own compute and communication, one after the other. That estimate favours
overlap, because it uses *split* compute: if half a batch takes more than half the time, as in decode, which reads all
weights twice, an unsplit step would compute for less. Waits for other ranks count on neither side of this comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median

from ubatch import Span, SpanKind, TraceSummary, summarise
from ubatch.trace.export import by_step, computing, describe_outcome, handoffs, measure
from ubatch.trace.file import RankTrace
from ubatch.trace.spans import UNSPLIT, StepNote

__all__ = [
    "Basis",
    "Comparison",
    "Group",
    "StepRecord",
    "between_steps",
    "compare",
    "group_steps",
    "read_steps",
    "size_class",
]

LIKE_SIZE = 1.15
"""Steps are of like size if their tokens differ by at most this factor."""
LEAST_STEPS = 3
"""Fewer steps are too few to judge by."""


@dataclass(frozen=True)
class StepRecord:
    """One step. Times are means over the ranks that recorded it.

    Attributes:
        step, schedule, lanes, chunks: as in `StepNote`.
        mode, tokens, reason: from the rank that decided: the first that declined overlap, as one rank declines for all;
            else the rank with the fewest tokens, not counting ranks without any.
        call_s: the whole call, including the work before the lanes start and after they end.
        summary: where the time from the first to the last span went.
        waits_s: transfer -> its part of `summary.exposed_s`.
        sent: names of the transfers that occupied the link. Other waits are for a few bytes, such as counts: they count
            as waits for other ranks.
        handoffs: number of hand-offs on one rank.
        lane_compute_s, rank_compute_s: compute time of every lane, and of every rank.
    """

    step: int
    mode: str
    schedule: str
    tokens: int
    lanes: int
    chunks: int
    reason: str | None
    call_s: float
    summary: TraceSummary
    waits_s: Mapping[str, float]
    sent: frozenset[str]
    handoffs: float
    lane_compute_s: tuple[float, ...]
    rank_compute_s: tuple[float, ...]

    @property
    def overlapped(self) -> bool:
        """Whether it ran in lanes or chunks."""
        return self.reason is None

    @property
    def link_wait_s(self) -> float:
        """Time spent waiting for the link."""
        return sum(seconds for name, seconds in self.waits_s.items() if name in self.sent)

    @property
    def meeting_s(self) -> float:
        """Time spent waiting for other ranks."""
        return sum(seconds for name, seconds in self.waits_s.items() if name not in self.sent)

    @property
    def serial_s(self) -> float:
        """The serial estimate: split compute, then communication."""
        return self.summary.compute_s + self.summary.communication_s


def read_steps(ranks: Iterable[RankTrace]) -> list[StepRecord]:
    """The steps that ended, in order. Steps in which no rank had tokens are left out."""
    notes: dict[int, dict[int, StepNote]] = {}
    spans: dict[int, list[Sequence[Span]]] = {}
    for rank in ranks:
        own = by_step(rank.spans)
        for note in rank.notes:
            notes.setdefault(note.step, {})[rank.rank] = note
            spans.setdefault(note.step, []).append(own.get(note.step, ()))
    return [
        _record(notes[step], spans[step]) for step in sorted(notes) if any(note.tokens for note in notes[step].values())
    ]


def _record(noted: Mapping[int, StepNote], spans: Sequence[Sequence[Span]]) -> StepRecord:
    notes = list(noted.values())
    fewest = min((note for note in notes if note.tokens), key=lambda note: note.tokens)
    decliners = (note.declined_by for note in notes)
    deciding = next((noted[rank] for rank in decliners if rank is not None and rank in noted), fewest)
    summaries = [summarise(share) for share in spans]
    waits: dict[str, float] = {}
    for span in (span for share in spans for span in share if span.kind is SpanKind.WAIT):
        waits[span.name] = waits.get(span.name, 0.0) + (span.end - span.start) / len(notes)
    lanes = sorted({span.lane for share in spans for span in share if span.lane != UNSPLIT})
    return StepRecord(
        step=deciding.step,
        mode=deciding.mode,
        schedule=deciding.schedule,
        tokens=deciding.tokens,
        lanes=max(note.lanes for note in notes),
        chunks=max(note.chunks for note in notes),
        reason=deciding.reason,
        call_s=fmean(note.end - note.start for note in notes),
        summary=_mean(summaries),
        waits_s=waits,
        sent=frozenset(span.name for share in spans for span in share if span.kind is SpanKind.TRANSFER),
        handoffs=fmean(len(handoffs(share)) for share in spans),
        lane_compute_s=tuple(
            fmean(measure(computing(span for span in share if span.lane == lane)) for share in spans) for lane in lanes
        ),
        rank_compute_s=tuple(summary.compute_s for summary in summaries),
    )


def _mean(summaries: Sequence[TraceSummary]) -> TraceSummary:
    return TraceSummary(**{name: fmean(getattr(each, name) for each in summaries) for name in vars(summaries[0])})


def between_steps(rank: RankTrace) -> tuple[float, float]:
    """Seconds from the first step's start to the last step's end, and how many of these seconds no step ran."""
    calls = sorted((note.start, note.end) for note in rank.notes)
    if not calls:
        return 0.0, 0.0
    whole = calls[-1][1] - calls[0][0]
    return whole, max(0.0, whole - sum(end - start for start, end in calls))


# ------------------------------------------------------------------------------------------------------- comparisons


class Basis(StrEnum):
    """The reference that overlapped steps were compared with."""

    UNSPLIT = "unsplit steps of like size"
    ESTIMATE = "the serial estimate, split compute + communication"


@dataclass(frozen=True)
class Comparison:
    """Overlapped steps of one mode and size class.

    Attributes:
        size: their size class: from `size` to `2 * size - 1` tokens.
        changes: for every overlapped step, its time / its reference's time - 1: 0.1 is a tenth slower.
        step_s: median time of the overlapped steps.
    """

    mode: str
    size: int
    changes: tuple[float, ...]
    step_s: float
    basis: Basis

    @property
    def change(self) -> float:
        return median(self.changes)


def size_class(tokens: int) -> int:
    """The largest power of two up to `tokens`."""
    return 1 << (tokens.bit_length() - 1)


def compare(steps: Iterable[StepRecord]) -> list[Comparison]:
    """Compare by mode, smallest size first; leaves out classes with fewer than `LEAST_STEPS` overlapped steps."""
    steps = [step for step in steps if step.call_s > 0]
    unsplit = [step for step in steps if not step.overlapped]
    classes: dict[tuple[str, int], list[StepRecord]] = {}
    for step in steps:
        if step.overlapped:
            classes.setdefault((step.mode, size_class(step.tokens)), []).append(step)
    made = (
        _comparison(mode, size, members, [other for other in unsplit if other.mode == mode])
        for (mode, size), members in sorted(classes.items())
    )
    return [comparison for comparison in made if comparison is not None]


def _comparison(
    mode: str, size: int, overlapped: Sequence[StepRecord], unsplit: Sequence[StepRecord]
) -> Comparison | None:
    step_s = median(step.call_s for step in overlapped)
    references: dict[int, float | None] = {}
    for tokens in {step.tokens for step in overlapped}:
        alike = [
            other.call_s for other in unsplit if max(other.tokens, tokens) <= LIKE_SIZE * min(other.tokens, tokens)
        ]
        references[tokens] = median(alike) if len(alike) >= LEAST_STEPS else None
    changes = [step.call_s / reference - 1 for step in overlapped if (reference := references[step.tokens]) is not None]
    if len(changes) >= LEAST_STEPS:
        return Comparison(mode, size, tuple(changes), step_s, Basis.UNSPLIT)
    changes = [(step.summary.wall_s - step.meeting_s) / step.serial_s - 1 for step in overlapped if step.serial_s > 0]
    if len(changes) >= LEAST_STEPS:
        return Comparison(mode, size, tuple(changes), step_s, Basis.ESTIMATE)
    return None


# ------------------------------------------------------------------------------------------------------------ groups


@dataclass(frozen=True)
class Group:
    """Steps of one mode that ran in the same way.

    Attributes:
        mode: mode of the steps; empty if there are several modes.
        tokens: fewest and most tokens of a step.
        step_s: median time of a step.
        total: where the time of all these steps went, summed.
    """

    mode: str
    outcome: str
    steps: int
    tokens: tuple[int, int]
    step_s: float
    total: TraceSummary


def group_steps(steps: Iterable[StepRecord], key: Callable[[StepRecord], tuple[str, str]] | None = None) -> list[Group]:
    """Group steps by mode and outcome; the overlapped steps of a mode are first."""
    chosen = key or (lambda step: (step.mode, _outcome(step)))
    groups: dict[tuple[str, str], list[StepRecord]] = {}
    for step in sorted(steps, key=lambda step: (step.mode, not step.overlapped, _outcome(step))):
        groups.setdefault(chosen(step), []).append(step)
    return [_group(*name, members) for name, members in groups.items()]


def _group(mode: str, outcome: str, members: Sequence[StepRecord]) -> Group:
    names = vars(members[0].summary)
    return Group(
        mode,
        outcome,
        len(members),
        (min(step.tokens for step in members), max(step.tokens for step in members)),
        median(step.call_s for step in members),
        TraceSummary(**{name: sum(getattr(step.summary, name) for step in members) for name in names}),
    )


def _outcome(step: StepRecord) -> str:
    return describe_outcome(step.lanes, step.chunks, step.reason)
