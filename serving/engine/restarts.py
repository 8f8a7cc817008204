"""How often engines may be started again, and the pause meanwhile."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from serving.engine.options import RestartLimits

_EXPECTED_S = 10.0
"""How long the first restart is expected to take, in seconds."""


@dataclass(frozen=True)
class Pause:
    """Engines are started again.

    Attributes:
        reason: what happened, as a sentence.
        since: when it was noticed, in seconds of `time.monotonic`.
        expected_s: how long it will take, by the last restart.
    """

    reason: str
    since: float
    expected_s: float

    @property
    def left_s(self) -> float:
        """How much longer it is expected to take, in seconds; at least 1."""
        return max(1.0, self.since + self.expected_s - time.monotonic())


class RestartBudget:
    """Counts restarts in a sliding window.

    Attributes:
        expected_s: how long a restart takes, by the last one, in seconds.
    """

    def __init__(self, limits: RestartLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._begun: deque[float] = deque()
        self.expected_s = _EXPECTED_S

    def may_restart(self) -> bool:
        """Whether engines may be started once more; counts it, if so."""
        now = self._clock()
        while self._begun and now - self._begun[0] >= self._limits.engine_restart_window_s:
            self._begun.popleft()
        if len(self._begun) >= self._limits.max_engine_restarts:
            return False
        self._begun.append(now)
        return True

    def took(self, seconds: float) -> None:
        """A restart has taken so long."""
        self.expected_s = seconds
