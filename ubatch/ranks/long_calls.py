"""Calls that take longer than `timeout_s` and do not hang.

    taking_long     compiling, tuning, loading weights: peers wait for this rank (`ubatch.process.lateness`)
    holding_gil     one call that waits for peers itself and keeps Python's lock: no thread of this process can say that
                    it lives (`ubatch.ranks.peer_watch`)

In both the lane that calls is not taken for hung, and neither peers nor who watches the process
(`ubatch.process.heartbeat`) take this rank for dead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ubatch.lanes.context import current_lane
from ubatch.process.lateness import LATE_S, late
from ubatch.process.silences import silence

__all__ = ["holding_gil", "taking_long"]

_SLACK_S = 5.0
"""What a call may take beyond its own time-out."""


@contextmanager
def taking_long(what: str) -> Iterator[None]:
    """Let this rank compile, tune or load in the `with` block.

    Args:
        what: for reports, such as "autotuning".
    """
    with late(what), silence(LATE_S), _waiting(what, math.inf):
        yield


@contextmanager
def holding_gil(what: str, limit_s: float) -> Iterator[None]:
    """Let one call wait for peers with Python's lock held.

    Args:
        what: for reports.
        limit_s: when that call gives up by itself.
    """
    limit_s += _SLACK_S
    with silence(limit_s), _waiting(what, time.monotonic() + limit_s):
        yield


@contextmanager
def _waiting(what: str, until: float) -> Iterator[None]:
    """The lane, if this is one, holds the baton for long."""
    lane = current_lane()
    if lane is None or lane.waiting is not None:  # what is tuned may tune itself
        yield
        return
    lane.waiting, lane.waits_until = what, until
    try:
        yield
    finally:
        lane.baton.since = time.monotonic()
        lane.waiting, lane.waits_until = None, 0.0
