"""What happened when: cheap spans per lane and per transfer.

A span is one tuple-like record appended to a list; with tracing off nothing is recorded at all. The same record
answers three questions: in what *order* did the lanes run (`order`, which must equal `interleave`), what did the
time go to (`spans`, which `trace_export` draws), and what would an ideal machine make of it (`events`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["UNSPLIT", "Event", "EventKind", "Span", "SpanKind", "Trace", "current_trace", "tracing"]

UNSPLIT = -1
"""The lane number of what ran outside any lane."""


class SpanKind(StrEnum):
    """What a span shows."""

    COMPUTE = "compute"
    """a lane held the baton and ran; named by the point that it reached"""
    WAIT = "wait"
    """a lane held the baton and waited for a transfer"""
    TRANSFER = "transfer"
    """a transfer was on the link"""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time.

    Attributes:
        kind: compute, wait or transfer.
        name: the point reached, or the transfer's name.
        lane: which lane; `UNSPLIT` outside lanes.
        start, end: seconds of `time.monotonic`.
        step: which call of the wrapper, from 1.
        bytes: sent to and received from other ranks, for transfers.
    """

    kind: SpanKind
    name: str
    lane: int
    start: float
    end: float
    step: int
    bytes: int = 0


class EventKind(StrEnum):
    """What a lane did at the end of a stretch of compute."""

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
    """One step of a lane's program; `simulate.programs_of` turns them into what the simulator runs.

    Attributes:
        step, lane: as in `Span`.
        kind: what happened.
        name: the point, or the transfer's key (`name.number`, counted per lane and step).
        cpu_s: CPU seconds of the process (all threads) since the lane's previous event.
        wait_cpu_s: for a wait, CPU seconds during it: the transport's own copies.
        link: for a wait, how long the transfer occupied the link.
    """

    step: int
    lane: int
    kind: EventKind
    name: str
    cpu_s: float
    wait_cpu_s: float = 0.0
    link: LinkTime = LinkTime()


@dataclass
class Trace:
    """The spans of some steps.

    Attributes:
        spans: in the order in which they ended.
        events: what every lane did, in running order, with its CPU time.
        order: `(lane, point)` per active point passed and per lane that ended, for the steps that overlapped.
        step: the current step; the wrapper counts it.
    """

    spans: list[Span] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    order: list[tuple[int, str]] = field(default_factory=list)
    step: int = 0

    def add(self, kind: SpanKind, name: str, lane: int, start: float, end: float, size: int = 0) -> None:
        """Record a span of the current step."""
        self.spans.append(Span(kind, name, lane, start, end, self.step, size))

    def clear(self) -> None:
        """Forget everything but the step count."""
        self.spans.clear()
        self.events.clear()
        self.order.clear()


_trace: ContextVar[Trace | None] = ContextVar("ubatch_trace", default=None)


def current_trace() -> Trace | None:
    """The trace that spans go to, or None when nothing is recorded."""
    return _trace.get()


@contextmanager
def tracing(trace: Trace | None = None) -> Iterator[Trace]:
    """Record every wrapper call and transfer of the `with` block, lanes included.

    Args:
        trace: where to; a new one by default.
    """
    chosen = trace if trace is not None else Trace()
    token = _trace.set(chosen)
    try:
        yield chosen
    finally:
        _trace.reset(token)
