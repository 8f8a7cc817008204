"""Whether engines that have failed may be started again, and why they were: counts, a window, and the limits.

    `--max-engine-restarts`   most restarts within `--engine-restart-window-s`, whatever their reason
    `SEARCH_RESTARTS`         the same for those of a search for a request that kills engines (`suspects`)

The two are counted apart: a search does not use up what is for other failures.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from serving.engine.options import RestartLimits

SEARCH_RESTARTS = 24
"""A search for two guilty requests among 1,024 needs at most 21: one that begins it, and ten for each."""


_EXPECTED_S = 10.0
"""How long the first restart is expected to take, in seconds."""


class RestartReason(StrEnum):
    """How an engine has failed: the label of a metric.

    Attributes:
        KILLED: its process was ended by a signal.
        EXITED: its process ended without a report.
        HUNG: it gave no sign of life.
        FAILED: it raised an error.
        UNREACHABLE: its node cannot be reached, or has ended.
    """

    KILLED = "killed"
    EXITED = "exited"
    HUNG = "hung"
    FAILED = "failed"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class Pause:
    """The engines are started again.

    Attributes:
        reason: what happened, as a sentence.
        since: when the failure was noticed, by `time.monotonic`.
        expected_s: how long it is expected to take from then on, in seconds.
    """

    reason: str
    since: float
    expected_s: float

    @property
    def left_s(self) -> float:
        """How much longer it is expected to take, in seconds; at least 1."""
        return max(1.0, self.since + self.expected_s - time.monotonic())


class RestartBudget:
    """Counts restarts.

    Args:
        clock: the time, in seconds.

    Attributes:
        expected_s: how long a restart takes, as the last one did, in seconds.
    """

    def __init__(self, limits: RestartLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = limits.engine_restart_window_s
        most = limits.max_engine_restarts
        self._most = {False: most, True: SEARCH_RESTARTS if most else 0}  # of a search or not
        self._at: dict[bool, deque[float]] = {False: deque(), True: deque()}
        self._clock = clock
        self._counts: dict[str, int] = dict.fromkeys(RestartReason, 0)
        self.expected_s = _EXPECTED_S

    @property
    def counts(self) -> Mapping[str, int]:
        """Reason -> restarts so far, all reasons."""
        return self._counts

    def may_restart(self, reason: RestartReason, *, searching: bool = False) -> bool:
        """Whether a restart is within the limit. If it is, it is counted.

        Args:
            searching: it is one of a search (`Verdict.searching`).
        """
        now, at = self._clock(), self._at[searching]
        while at and at[0] <= now - self._window_s:
            at.popleft()
        if len(at) >= self._most[searching]:
            return False
        at.append(now)
        self._counts[reason] += 1
        return True
