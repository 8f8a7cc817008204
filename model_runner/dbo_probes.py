"""What `--dbo-auto` remembers of steps: a step that all ranks saw, a probe of four of them, an estimate from probes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

__all__ = ["LEAST_PROBES", "UNKNOWN_LOSS", "Estimate", "Probe", "Seen"]

UNKNOWN_LOSS = 0.3
"""What a probe of an arm that nobody has tried is expected to lose, as a share of a step."""
LEAST_PROBES = 2
_ESTIMATES_KEPT = 9
_LEAST_DOUBT = 0.03
"""Of one probe; two that agree may do so by chance."""


@dataclass(frozen=True)
class Seen:
    """A step, as all ranks know it after the vote.

    Attributes:
        kind: decode, prefill or verify.
        fewest: tokens of the busy rank with the fewest; the threshold is compared with it.
        most: tokens of the rank with the most; the step takes as long as it.
        arm: how it ran.
    """

    kind: str
    fewest: int
    most: int
    arm: str

    @property
    def size(self) -> int:
        """The power of two below: steps of one size share an estimate."""
        return 1 << (self.fewest.bit_length() - 1)


@dataclass
class Estimate:
    """Of log(arm / serial) at one size: the latest, and the step when the last one came."""

    logs: list[float] = field(default_factory=list)
    step: int = 0

    @property
    def known(self) -> bool:
        return len(self.logs) >= LEAST_PROBES

    @property
    def log(self) -> float:
        return median(self.logs) if self.logs else 0.0

    @property
    def doubt(self) -> float:
        """Half the width of what it may be."""
        if not self.known:
            return UNKNOWN_LOSS
        spread = median(abs(value - self.log) for value in self.logs)
        return (_LEAST_DOUBT + 1.5 * spread) / math.sqrt(len(self.logs))

    def add(self, log: float, step: int) -> None:
        self.logs = [*self.logs[-_ESTIMATES_KEPT + 1 :], log]
        self.step = step


@dataclass
class Probe:
    """Four steps of one size; `steps` are the numbers of those that ran."""

    kind: str
    size: int
    used: str
    other: str
    most: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    strangers: int = 0

    @property
    def wanted(self) -> str:
        """The arm of the next of its steps."""
        return self.other if len(self.steps) in (1, 2) else self.used

    @property
    def complete(self) -> bool:
        return len(self.steps) == 4
