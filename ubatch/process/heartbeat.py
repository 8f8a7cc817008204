"""The heartbeat of this process, for a process that watches it, such as the server that watches its engines.

The working threads send it. A separate thread would keep beating while the work hangs:

    between steps              the loop calls `beat`
    between layers             the model calls `beat`, also in a step without lanes
    waiting for peers, lanes   the wait calls `beat`; it watches the peers, and has its own time-out
    a declared long call       no beat; its time limit is sent before the call (`ubatch.ranks.long_calls`)
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

from ubatch.process.silences import listeners, silences_in_force

__all__ = ["Heart", "beat", "stop_hearts"]

_BEATS_ASIDE = 2
"""A declared silence is withdrawn after this many beats without such a call."""


class Heart:
    """Sends a beat at most every `every_s` seconds, from any thread. It stops when the last reference is dropped.

    Args:
        send: called with the seconds by which the next beat may be later than usual; by one thread at a time.
        every_s: minimum seconds between two beats.
    """

    def __init__(self, send: Callable[[float], None], every_s: float) -> None:
        self._send, self._every_s = send, every_s
        self._lock = threading.Lock()
        self._last = -float("inf")
        self._silence_s = 0.0
        self._stopped = False
        _hearts.add(self)
        listeners.add(self)

    def beat(self) -> None:
        """Send a beat, unless the last one was less than `every_s` seconds ago."""
        if time.monotonic() - self._last < self._every_s:
            return
        with self._lock:
            if self._silence_s and not silences_in_force(_BEATS_ASIDE * self._every_s):
                self._silence_s = 0.0
            self._now()

    def tell_silence(self, limit_s: float) -> None:
        """Announce a call during which this process may send no beat for up to `limit_s` seconds."""
        with self._lock:
            if limit_s > self._silence_s:
                self._silence_s = limit_s
                self._now()

    def stop(self) -> None:
        """Stop all beats, in any thread: the connection that they use is about to be closed."""
        with self._lock:
            self._stopped = True

    def _now(self) -> None:
        self._last = time.monotonic()
        if not self._stopped:
            self._send(self._silence_s)


_hearts: weakref.WeakSet[Heart] = weakref.WeakSet()


def beat() -> None:
    """Send a beat to every process that watches this one. Called regularly by waits."""
    for heart in list(_hearts):
        heart.beat()


def stop_hearts() -> None:
    """Stop all heartbeats of this process."""
    for heart in list(_hearts):
        heart.stop()


os.register_at_fork(after_in_child=_hearts.clear)  # they belong to the parent process
