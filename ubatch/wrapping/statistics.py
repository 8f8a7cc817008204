"""A wrapper's counters."""

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ubatch.schedules.schedule import Schedule
from ubatch.schedules.vote import Decision, DeclineReason
from ubatch.streams.graph_protocols import GraphMiss
from ubatch.trace.spans import note_outcome

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UBatchStatistics:
    """Counts since the wrapper was made.

    Attributes:
        calls: all calls.
        engaged: calls that ran in lanes.
        engaged_single: calls that overlapped unsplit (single-batch overlap).
        proved: calls that ran unsplit and passed a proof (`ubatch.wrapping.proof`).
        proof_seconds: time of all proofs, also failed ones, without the calls themselves.
        declined: calls that ran unsplit, by reason.
        handoffs: switches from one lane to another.
        lane_threads_started: worker threads made; more than the lanes means some hung and were replaced.
        last_reason: a sentence about the last call that declined, or None.
        sm_budget: kernel or back end -> whether it kept to its budget of SMs (`Schedule.comm_sms`).
        graph_replays: calls that replayed a graph; they count as engaged or declined, too.
        graph_misses: calls that found no graph while `cudagraph_mode` is `FULL`.
        graph_misses_by_reason: reason -> number of misses.
        last_graph_miss: a sentence about the last miss, or None.
    """

    calls: int
    engaged: int
    declined: Mapping[DeclineReason, int]
    handoffs: int
    lane_threads_started: int
    last_reason: str | None
    sm_budget: Mapping[str, bool] = field(default_factory=dict)
    graph_replays: int = 0
    graph_misses: int = 0
    graph_misses_by_reason: Mapping[GraphMiss, int] = field(default_factory=dict)
    last_graph_miss: str | None = None
    engaged_single: int = 0
    proved: int = 0
    proof_seconds: float = 0.0


@dataclass
class Tally:
    """Counts a wrapper's calls, and notes in the trace how each ran. Attributes as in `UBatchStatistics`."""

    calls: int = 0
    engaged: int = 0
    engaged_single: int = 0
    proved: int = 0
    proof_seconds: float = 0.0
    declined: Counter[DeclineReason] = field(default_factory=Counter)
    last_reason: str | None = None
    _beside: dict[int, int] = field(default_factory=dict)

    def counts(self) -> dict[str, Any]:
        """The counters by name, with those of calls during others."""
        counts = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        beside = sum(list(self._beside.values()))
        declined = dict(self.declined) | ({DeclineReason.CONCURRENT_CALL: beside} if beside else {})
        return counts | {"calls": self.calls + beside, "declined": declined}

    def beside(self, *, nested: bool) -> None:
        """Count a call that runs unsplit while another one runs. Every thread has a counter of its own, since several
        may count at once; nested calls have one, too, since they belong to the call that they are part of."""
        thread = 0 if nested else threading.get_ident()
        self._beside[thread] = self._beside.get(thread, 0) + 1
        self.last_reason = f"{DeclineReason.CONCURRENT_CALL}: another call was running in this UBatchWrapper."

    def neighbours(self) -> int:
        """How many calls of other threads have begun while another one ran."""
        return sum(count for thread, count in list(self._beside.items()) if thread)

    def overlapped(self, tokens: Sequence[int], schedule: Schedule, *, replayed: bool = False) -> None:
        """Count a call that overlaps, in lanes or unsplit.

        Args:
            tokens: tokens of every lane.
            replayed: whether a graph is replayed.
        """
        lanes = len(tokens)
        if lanes > 1:
            self.engaged += 1
        else:
            self.engaged_single += 1
        note_outcome(lanes=lanes, chunks=schedule.chunks)
        if _logger.isEnabledFor(logging.DEBUG):
            shares, how = " + ".join(map(str, tokens)), "replayed" if replayed else "run"
            _logger.debug("split: %s tokens, %s by schedule %s", shares, how, schedule.describe())

    def passed(self) -> None:
        """Count a call that passed a proof."""
        self.proved += 1
        note_outcome(reason="proved")

    def unsplit(self, decision: Decision | None, why: str | None) -> DeclineReason:
        """Count a call that runs unsplit, and return the reason. `why`: a sentence for it."""
        reason, by = DeclineReason.NOT_REQUESTED, None
        if decision is not None:
            reason, by = decision.reason or reason, decision.declined_by
        if by is not None:
            why = why or f"{reason} (rank {by})"
        self.declined[reason] += 1
        self.last_reason = f"{reason}: {why}" if why else str(reason)
        note_outcome(reason=reason, declined_by=by)
        return reason
