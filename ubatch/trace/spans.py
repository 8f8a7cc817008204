"""Records of a trace: cheap spans per lane and per transfer.

A span is one tuple-like record appended to a list; with tracing off nothing is recorded at all. A trace holds the
*order* in which lanes ran (`order`, equal to `interleave`), how the time was spent (`spans`, exported by
`ubatch.trace.export`), the input for a simulation on an ideal machine (`events`), and what each step was and why it did
or did not overlap (`notes`).
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import cast

from ubatch.process.interrupts import changing

UNSPLIT = -1
"""Lane number for work outside lanes."""


class SpanKind(StrEnum):
    """Kind of a span."""

    COMPUTE = "compute"
    """a lane held the baton and ran; named by what ended it (`ubatch.trace.stages`)"""
    WAIT = "wait"
    """a lane held the baton and waited for a transfer"""
    TRANSFER = "transfer"
    """a transfer was on the link"""


@dataclass(frozen=True, slots=True)
class Span:
    """A time interval of a lane or transfer.

    Attributes:
        kind: compute, wait or transfer.
        name: the point reached, or the transfer's name.
        lane: which lane; `UNSPLIT` outside lanes.
        start, end: seconds of `time.monotonic`.
        step: which call of the wrapper, from 1.
        bytes: sent to and received from other ranks, for transfers.
        launched, launcher: of a wait: when its transfer was launched (seconds of `time.monotonic`; 0 if that is not
            known), and in which lane.
        layer: of a compute span that ends at a point: the kind of layer that passed it; empty if it told none.
    """

    kind: SpanKind
    name: str
    lane: int
    start: float
    end: float
    step: int
    bytes: int = 0
    launched: float = 0.0
    launcher: int = UNSPLIT
    layer: str = ""


class EventKind(StrEnum):
    """What a lane did at the end of a stage."""

    POINT = "point"
    LAUNCH = "launch"
    WAIT = "wait"
    END = "end"


@dataclass(frozen=True, slots=True)
class LinkTime:
    """How long a transfer occupied each direction of this rank's full-duplex link."""

    send_s: float = 0.0
    receive_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a lane; `simulate.programs_of` turns events into the simulator's programs.

    Attributes:
        name: the point, or the transfer's key (`name.number`, counted per lane and step).
        cpu_s: CPU seconds of the process (all threads) since the lane's previous event.
        wait_cpu_s: for a wait, CPU seconds during it: the transport's own copies.
        link: for a wait, how long the transfer occupied the link.
        layer: for a point, the kind of layer that passed it; empty if it told none.
    """

    step: int
    lane: int
    kind: EventKind
    name: str
    cpu_s: float
    wait_cpu_s: float = 0.0
    link: LinkTime = LinkTime()
    layer: str = ""


@dataclass(frozen=True, slots=True)
class StepNote:
    """Description of one call of a wrapper.

    Attributes:
        step: as in `Span`.
        mode: a `ForwardMode`.
        tokens: of this rank.
        schedule: name of the schedule that it ran under, or would have run under.
        lanes, chunks: numbers that it ran in; 1 and 1 if it did not overlap.
        reason: why it did not overlap, a `DeclineReason`; None if it did.
        declined_by: the first rank that voted no; None if none did.
        start, end: of the whole call, including work before and after the lanes; seconds of `time.monotonic`.
    """

    step: int
    mode: str
    tokens: int
    schedule: str
    lanes: int = 1
    chunks: int = 1
    reason: str | None = None
    declined_by: int | None = None
    start: float = 0.0
    end: float = 0.0


@dataclass
class Trace:
    """The spans of some steps.

    Attributes:
        spans: in order of their ends.
        events: all lanes' events, in running order, with CPU times.
        order: `(lane, point)` per active point passed and per lane that ended, for the steps that overlapped.
        notes: one per step, in order; a failed step has none.
        step: the current step; `traced_step` counts it.
    """

    spans: list[Span] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    order: list[tuple[int, str]] = field(default_factory=list)
    notes: list[StepNote] = field(default_factory=list)
    step: int = 0
    _note: StepNote | None = None
    _launched: dict[tuple[int, str], float] = field(default_factory=dict)

    def add(
        self, kind: SpanKind, name: str, lane: int, start: float, end: float, size: int = 0, *, layer: str = ""
    ) -> None:
        """Record a span of the current step."""
        self.spans.append(Span(kind, name, lane, start, end, self.step, size, layer=layer))

    def add_launch(self, lane: int, key: str, at: float) -> None:
        """Note when a lane launched a transfer."""
        self._launched[lane, key] = at

    def add_wait(self, name: str, lane: int, start: float, end: float, launcher: int, launched: float | str) -> None:
        """Record a wait; `launched` is the time of the launch, or the transfer's key in `add_launch`."""
        at = self._launched.pop((launcher, launched), 0.0) if isinstance(launched, str) else launched
        self.spans.append(Span(SpanKind.WAIT, name, lane, start, end, self.step, 0, at, launcher))

    def _take_note(self) -> StepNote | None:
        note, self._note = self._note, None
        return note

    def clear(self) -> None:
        """Forget everything but the step count."""
        self.spans.clear()
        self.events.clear()
        self.order.clear()
        self.notes.clear()


_trace: ContextVar[Trace | None] = ContextVar("ubatch_trace", default=None)


current_trace = _trace.get
"""Returns the trace that is being recorded, or None."""


def tracing(trace: Trace | None = None) -> AbstractContextManager[Trace]:
    """Record every wrapper call and transfer of the `with` block, lanes included.

    Args:
        trace: receives the records; a new one by default.
    """
    return cast("AbstractContextManager[Trace]", changing(_trace, Trace() if trace is None else trace))


def note_step(mode: str, tokens: int, schedule: str) -> None:
    """Record in the trace what the current step is; see `StepNote`."""
    trace = current_trace()
    if trace is not None:
        trace._note = StepNote(trace.step, str(mode), tokens, schedule)


def note_outcome(*, lanes: int = 1, chunks: int = 1, reason: str | None = None, declined_by: int | None = None) -> None:
    """Record in the trace how the current step ran, after `note_step`; the last call wins."""
    trace = current_trace()
    if trace is not None and trace._note is not None:
        why = None if reason is None else str(reason)
        trace._note = replace(trace._note, lanes=lanes, chunks=chunks, reason=why, declined_by=declined_by)


@contextmanager
def traced_step() -> Iterator[None]:
    """Put around a call of a wrapper: counts the step, and adds start and end to its note."""
    trace = current_trace()
    if trace is None:
        yield
        return
    trace.step += 1
    trace._take_note()
    start = time.monotonic()
    yield
    note = trace._take_note()
    if note is not None:
        trace.notes.append(replace(note, start=start, end=time.monotonic()))
