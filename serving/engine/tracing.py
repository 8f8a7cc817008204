"""What some steps of an engine looked like: every 32nd overlapped one for the statistics, all of them for a profile.

The baton is exclusive, so a step's lane spans follow one another. Where the next span is another lane's, the first
lane handed on at its end and the other ran from its start: the gap between is what the hand-off cost.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serving.logs import log_event
from ubatch import Span, SpanKind, Trace, summarise, tracing, write_chrome
from ubatch.trace import UNSPLIT

__all__ = ["StepTracer", "TracedTime", "handoff_wait"]

_logger = logging.getLogger(__name__)

TRACE_EVERY = 32
"""Of so many overlapped steps one is traced."""
MOST_SPANS = 1_000_000
"""A profile stops recording beyond this, some 200 MB: whoever started it may have forgotten it."""


@dataclass(frozen=True)
class TracedTime:
    """Totals over the traced steps, in seconds; the fields are those of `EngineStatistics`."""

    traced_steps: int = 0
    hidden_s: float = 0.0
    exposed_s: float = 0.0
    handoff_wait_s: float = 0.0
    communication_s: float = 0.0

    def add(self, spans: Iterable[Span]) -> TracedTime:
        """With one more step."""
        spans = tuple(spans)
        summary = summarise(spans)
        return TracedTime(
            self.traced_steps + 1,
            self.hidden_s + summary.hidden_s,
            self.exposed_s + summary.exposed_s,
            self.handoff_wait_s + handoff_wait(spans),
            self.communication_s + summary.communication_s,
        )


class StepTracer:
    """Decides which steps of one rank are traced, and keeps what they gave.

    Attributes:
        total: over the steps that were traced for the statistics. While a profile runs there are none.
    """

    def __init__(self) -> None:
        self.total = TracedTime()
        self._untraced = 0
        self._profile: Trace | None = None
        self._full = False

    @contextmanager
    def step(self) -> Iterator[Trace | None]:
        """Around a step's launch; the trace that it goes to, or None. `engaged` must hear whether it overlapped."""
        if self._profile is not None:
            trace = None if self._full else self._profile
        else:
            trace = Trace() if self._untraced >= TRACE_EVERY - 1 else None
        if trace is None:
            yield None
            return
        with tracing(trace):
            yield trace
        if trace is self._profile:
            self._trim(trace)

    def engaged(self, trace: Trace | None) -> None:
        """A step that overlapped is over."""
        if trace is None or trace is self._profile:
            self._untraced += 1
        elif trace.spans and self._untraced >= TRACE_EVERY - 1:  # without any it was of a profile that is over
            self.total = self.total.add(trace.spans)
            self._untraced = 0

    def start_profile(self) -> None:
        """Record every step from now on; what an earlier profile recorded is dropped."""
        if self._profile is not None:
            self._profile.clear()
        self._profile, self._full = Trace(), False

    def stop_profile(self, path: Path, rank: int) -> str | None:
        """Write what was recorded as a Chrome trace; returns why not, None when it is written."""
        trace, self._profile = self._profile, None
        if trace is None:
            return "no profile was started."
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_chrome(path, {rank: trace.spans})
        except OSError as error:
            return f"cannot write {path}: {error.strerror}."
        else:
            log_event(_logger, "profile written", path=path, steps=trace.step, spans=len(trace.spans))
            return None
        finally:
            trace.clear()  # the overlapped loop may still have to process a step that was recorded in it

    def _trim(self, trace: Trace) -> None:
        trace.events.clear()  # for the simulator; a profile shows spans only
        trace.order.clear()
        if len(trace.spans) >= MOST_SPANS:
            self._full = True
            log_event(_logger, "profile full", level=logging.WARNING, spans=len(trace.spans), steps=trace.step)


def handoff_wait(spans: Iterable[Span]) -> float:
    """Seconds between one lane's hand-off and the next lane's running, over all hand-offs of one rank's steps."""
    lanes = (span for span in spans if span.lane != UNSPLIT and span.kind is not SpanKind.TRANSFER)
    held = sorted(lanes, key=lambda span: (span.step, span.start, span.end))
    return sum(
        max(0.0, after.start - before.end)
        for before, after in itertools.pairwise(held)
        if before.lane != after.lane and before.step == after.step
    )
