"""Calls that may take longer than `timeout_s` without being hung.

    taking_long     compiling, tuning, loading weights: peers wait for this rank (`ubatch.process.job_store`)
    holding_gil     a call that waits for peers while it holds the GIL: no thread of this process can send a heartbeat
                        (`ubatch.ranks.peer_watch`)

During both, the calling lane does not count as hung, and neither peers nor a process that watches this one
(`ubatch.process.heartbeat`) take this rank for dead.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ubatch.lanes.context import current_lane
from ubatch.process.heartbeat import silence
from ubatch.process.job_store import LATE_S, late

_SLACK_S = 5.0
"""Seconds that a call may take beyond its own time-out."""


@contextmanager
def taking_long(what: str) -> Iterator[None]:
    """Let this rank compile, tune or load in the `with` block.

    On a GPU a lane leaves the core that it shares with others, to the end of the step: the compiler may need more.

    Args:
        what: for reports, such as "autotuning".
    """
    lane = current_lane()
    if lane is not None and lane.baton.core is not None:
        lane.baton.core.free()
    with late(what), silence(LATE_S), _waiting(what, math.inf):
        yield


@contextmanager
def holding_gil(what: str, limit_s: float) -> Iterator[None]:
    """Let one call in the `with` block wait for peers with the GIL held.

    Args:
        limit_s: seconds after which the call gives up by itself.
    """
    limit_s += _SLACK_S
    with silence(limit_s), _waiting(what, time.monotonic() + limit_s):
        yield


@contextmanager
def _waiting(what: str, until: float) -> Iterator[None]:
    """If this is a lane, let it hold the baton until `until` without counting as hung."""
    lane = current_lane()
    if lane is None or lane.waiting is not None:  # nested: a tuned kernel may itself be tuned
        yield
        return
    lane.waiting, lane.waits_until = what, until
    try:
        yield
    finally:
        lane.baton.since = time.monotonic()
        lane.waiting, lane.waits_until = None, 0.0
