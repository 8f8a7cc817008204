"""The step that is planned: its kind and sizes on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ubatch.errors import ConfigError

__all__ = ["Mode", "Workload"]


class Mode(StrEnum):
    """The kind of a step."""

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

    Raises:
        ConfigError: a number is out of range.
    """

    mode: Mode
    tokens: int
    context: int
    ep: int
    tokens_per_sequence: int = 1
    redundant_experts: int = 0
    skew: float = 1.0

    def __post_init__(self) -> None:
        least = {"tokens": 1, "context": 1, "ep": 2, "tokens_per_sequence": 1, "redundant_experts": 0, "skew": 1}
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise ConfigError(f"{name} must be at least {bound}, not {getattr(self, name)}.")
        if self.mode is not Mode.VERIFY and self.tokens_per_sequence != 1:
            raise ConfigError(f"tokens_per_sequence is for verify; {self.mode} has 1, not {self.tokens_per_sequence}.")
