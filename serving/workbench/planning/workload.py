"""What every rank does in the step that is planned."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ubatch.errors import ConfigError

__all__ = ["Mode", "Workload"]


class Mode(StrEnum):
    """What a step does."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True)
class Workload:
    """One step of every rank.

    Attributes:
        mode: prefill runs over the high-throughput kernels, decode and verify over the low-latency ones.
        tokens: of a rank.
        context: tokens that a sequence has in the cache (decode, verify), or of a prompt (prefill).
        ep: ranks.
        tokens_per_sequence: 1 but in verify.
        redundant_experts: copies beside the model's own.
        skew: load of the busiest rank over the mean; 1 is balanced.

    Raises:
        ConfigError: a number that cannot be.
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
