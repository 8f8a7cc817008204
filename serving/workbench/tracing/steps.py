"""The steps of a trace, over all ranks: their kind, where their time went, and whether overlapped ones were faster.

An overlapped step is compared with serial steps that were measured, of its mode and of like size. Its own compute and
communication, one after the other, are no substitute: two half batches may compute for much longer than a whole one, as
in decode, which reads all weights twice.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from ubatch import DeclineReason, Span, SpanKind, StepNote, TraceSummary, summarise
from ubatch.trace import UNSPLIT, RankTrace, by_step, computing, deciding_note, describe_outcome, handoffs, measure

LIKE_SIZE = 1.15
"""Of the serial steps in a class, those whose tokens differ by at most this factor are preferred."""
LEAST_STEPS = 3
"""Fewer steps are too few to judge by."""


@dataclass(frozen=True)
class StepRecord:
    """One step. Times are means over the ranks that recorded it.

    Attributes:
        step, schedule, lanes, chunks: as in `StepNote`.
        mode, tokens, reason: from the rank that decided (`deciding_note`).
        most_tokens: of the rank that has the most.
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
    most_tokens: int = 0

    @property
    def overlapped(self) -> bool:
        """Whether it ran in lanes or chunks."""
        return self.reason is None

    @property
    def single(self) -> bool:
        """Whether a rank had one token, which cannot be split, whatever the threshold is."""
        return not self.overlapped and self.tokens == 1 and self.reason != DeclineReason.DISABLED

    @property
    def link_wait_s(self) -> float:
        """Time spent waiting for the link."""
        return sum(seconds for name, seconds in self.waits_s.items() if name in self.sent)

    @property
    def meeting_s(self) -> float:
        """Time spent waiting for other ranks."""
        return sum(seconds for name, seconds in self.waits_s.items() if name not in self.sent)


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
    notes, deciding = list(noted.values()), deciding_note(noted)
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
        most_tokens=max(note.tokens for note in notes),
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


@dataclass(frozen=True)
class SizeClass:
    """Overlapped steps of one mode and size, and the serial steps that they are compared with.

    Attributes:
        size: from `size` to `2 * size - 1` tokens.
        overlapped, serial: the steps, as they were measured.
    """

    mode: str
    size: int
    overlapped: tuple[StepRecord, ...]
    serial: tuple[StepRecord, ...]

    @property
    def measured(self) -> bool:
        """Whether there are enough steps of both kinds to judge by."""
        return min(len(self.overlapped), len(self.serial)) >= LEAST_STEPS

    @property
    def changes(self) -> tuple[float, ...]:
        """For every overlapped step, its time / that of the serial steps nearest in size - 1: 0.1 is a tenth slower."""
        references = {tokens: self._serial_s(tokens) for tokens in {step.tokens for step in self.overlapped}}
        return tuple(step.call_s / references[step.tokens] - 1 for step in self.overlapped)

    @property
    def change(self) -> float:
        return median(self.changes)

    def _serial_s(self, tokens: int) -> float:
        alike = [
            step.call_s for step in self.serial if max(step.tokens, tokens) <= LIKE_SIZE * min(step.tokens, tokens)
        ]
        return median(alike if len(alike) >= LEAST_STEPS else [step.call_s for step in self.serial])


def size_class(tokens: int) -> int:
    """The largest power of two up to `tokens`."""
    return 1 << (tokens.bit_length() - 1)


def compare(steps: Iterable[StepRecord], serial: Iterable[StepRecord] = ()) -> list[SizeClass]:
    """The classes that have overlapped steps, by mode, smallest size first.

    Args:
        steps: of the trace. Its steps that did not overlap are serial ones, too.
        serial: of another trace, of a run without overlap.
    """
    classes: dict[tuple[str, int], tuple[list[StepRecord], list[StepRecord]]] = {}
    for step in (*steps, *(step for step in serial if not step.overlapped)):
        if step.call_s > 0:
            classes.setdefault((step.mode, size_class(step.tokens)), ([], []))[not step.overlapped].append(step)
    return [
        SizeClass(mode, size, tuple(overlapped), tuple(unsplit))
        for (mode, size), (overlapped, unsplit) in sorted(classes.items())
        if overlapped
    ]


# ------------------------------------------------------------------------------------------------------------ groups


@dataclass(frozen=True)
class Group:
    """Steps of one mode that ran in the same way.

    Attributes:
        mode: mode of the steps; empty if there are several modes.
        tokens: fewest and most tokens of a step, on any rank that has some.
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
        (min(step.tokens for step in members), max(max(step.tokens, step.most_tokens) for step in members)),
        median(step.call_s for step in members),
        TraceSummary(**{name: sum(getattr(step.summary, name) for step in members) for name in names}),
    )


def _outcome(step: StepRecord) -> str:
    if step.single:
        return "unsplit (one token cannot be split)"
    return describe_outcome(step.lanes, step.chunks, step.reason)
