"""What a wrapper counts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ubatch.schedules.schedule import Schedule
from ubatch.schedules.vote import Decision, DeclineReason
from ubatch.streams.graph_protocols import GraphMiss
from ubatch.trace.spans import note_outcome

__all__ = ["Tally", "UBatchStatistics"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UBatchStatistics:
    """What a wrapper did since it was made.

    Attributes:
        calls: all calls.
        engaged: calls that ran in lanes.
        engaged_single: calls that overlapped in one piece (single-batch overlap).
        proved: calls that ran whole, and showed that their like may overlap (`ubatch.wrapping.proof`).
        proof_seconds: what proofs have cost beside the calls themselves, also those that failed.
        declined: calls that ran unsplit, by reason.
        handoffs: switches from one lane to another.
        lane_threads_started: worker threads made; more than the lanes means some hung and were replaced.
        last_reason: a sentence about the last call that declined, or None.
        sm_budget: who ran under a budget of SMs (`Schedule.comm_sms`), and whether it kept to its share.
        graph_replays: calls that replayed a graph; they count as engaged or declined, too.
        graph_misses: calls that found no graph while `cudagraph_mode` is `FULL`.
        graph_misses_by_reason: why.
        last_graph_miss: a sentence about the last one, or None.
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
    """Counts a wrapper's calls, and notes in the trace how each ended. Attributes as in `UBatchStatistics`."""

    calls: int = 0
    engaged: int = 0
    engaged_single: int = 0
    proved: int = 0
    proof_seconds: float = 0.0
    declined: Counter[DeclineReason] = field(default_factory=Counter)
    last_reason: str | None = None

    def overlapped(self, tokens: Sequence[int], schedule: Schedule, *, replayed: bool = False) -> None:
        """A call overlaps, in lanes or in one piece.

        Args:
            tokens: of every lane.
            schedule: what it overlaps with.
            replayed: as a graph.
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
        """A call has shown that its like may overlap."""
        self.proved += 1
        note_outcome(reason="proved")

    def unsplit(self, decision: Decision | None, why: str | None) -> DeclineReason:
        """A call runs unsplit. Returns the reason; `why` is the same in a sentence."""
        reason, by = DeclineReason.NOT_REQUESTED, None
        if decision is not None:
            reason, by = decision.reason or reason, decision.declined_by
        if by is not None:
            why = why or f"{reason} (rank {by})"
        self.declined[reason] += 1
        self.last_reason = f"{reason}: {why}" if why else str(reason)
        note_outcome(reason=reason, declined_by=by)
        return reason
