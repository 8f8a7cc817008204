"""The step that is planned: its kind and sizes on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True)
class Workload:
    """One step of every rank.

    Attributes:
        mode: prefill uses the high-throughput kernels, decode and verify use the low-latency ones.
        tokens: tokens per rank.
        context: tokens of a sequence in the cache (decode, verify), or tokens of a prompt (prefill).
        ep: number of ranks.
        tokens_per_sequence: 1, except in verify.
        redundant_experts: copies of experts besides the model's own.
        skew: load of the busiest rank over the mean; 1 is balanced.
    """

    mode: Mode
    tokens: int
    context: int
    ep: int
    tokens_per_sequence: int = 1
    redundant_experts: int = 0
    skew: float = 1.0
