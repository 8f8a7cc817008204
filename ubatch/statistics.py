"""What a wrapper counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ubatch.graphs import GraphMiss
from ubatch.vote import DeclineReason

__all__ = ["UBatchStatistics"]


@dataclass(frozen=True)
class UBatchStatistics:
    """What a wrapper did since it was made.

    Attributes:
        calls: all calls.
        engaged: calls that ran in lanes.
        engaged_single: calls that overlapped in one piece (single-batch overlap).
        proved: calls that ran whole, and showed that their like may overlap (`ubatch.proof`).
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
