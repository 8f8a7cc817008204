"""The heartbeat of this process, for whoever watches it from outside, such as a server its engines.

It comes from the threads that do the work, not from one of its own, which would beat on while the work hangs:

    between steps              the loop calls `beat`
    between layers             the model does, in a step without lanes, too
    waiting for peers, lanes   that wait does; it looks out for them, and has a time-out of its own
    a declared long call       no beat; its limit is sent in front (`ubatch.ranks.long_calls`)
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

from ubatch.process.silences import hear_silences, silences_in_force

__all__ = ["Heart", "beat", "stop_hearts"]

_BEATS_ASIDE = 2
"""A declared silence is withdrawn when no such call was made for so many beats."""


class Heart:
    """Beats at most every `every_s` seconds, from whichever thread calls; it ends with its last reference.

    Args:
        send: told how many seconds longer than usual the next beat may take; called by one thread at a time.
        every_s: least time between two beats.
    """

    def __init__(self, send: Callable[[float], None], every_s: float) -> None:
        self._send, self._every_s = send, every_s
        self._lock = threading.Lock()
        self._last = -float("inf")
        self._silence_s = 0.0
        self._stopped = False
        _hearts.add(self)
        hear_silences(self)

    def beat(self) -> None:
        """Give a sign of life, if the last one is old enough."""
        if time.monotonic() - self._last < self._every_s:
            return
        with self._lock:
            if self._silence_s and not silences_in_force(_BEATS_ASIDE * self._every_s):
                self._silence_s = 0.0
            self._now()

    def tell_silence(self, limit_s: float) -> None:
        """A call begins that may keep this process from beating for so long."""
        with self._lock:
            if limit_s > self._silence_s:
                self._silence_s = limit_s
                self._now()

    def stop(self) -> None:
        """No beat from now on, whichever thread calls: what it sends with is about to be closed."""
        with self._lock:
            self._stopped = True

    def _now(self) -> None:
        self._last = time.monotonic()
        if not self._stopped:
            self._send(self._silence_s)


_hearts: weakref.WeakSet[Heart] = weakref.WeakSet()


def beat() -> None:
    """Give a sign of life wherever somebody watches this process; called by waits that go on."""
    for heart in list(_hearts):
        heart.beat()


def stop_hearts() -> None:
    """No beat of this process from now on."""
    for heart in list(_hearts):
        heart.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_hearts.clear)  # they beat for the parent
