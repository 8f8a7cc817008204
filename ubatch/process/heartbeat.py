"""The heartbeat of this process, for a process that watches it, such as the server that watches its engines.

The working threads send it. A separate thread would keep beating while the work hangs:

    between steps              the loop calls `beat`
    between layers             the model calls `beat`, also in a step without lanes
    waiting for peers, lanes   the wait calls `beat`; it watches the peers, and has its own time-out
    a declared long call       no beat; its time limit is sent before the call (`ubatch.ranks.long_calls`)

Code declares a call during which this process cannot send signs of life, such as one that holds the GIL, by `silence`.
All that sends them (`SignOfLife`) announces the call before it starts.
"""

import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BEATS_ASIDE = 2
"""A declared silence is withdrawn after this many beats without such a call."""


class _Call:
    """A call during which this process is silent."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s


_calls: weakref.WeakSet[_Call] = weakref.WeakSet()
"""The silent calls of this process. The entry of an interrupted call ends with its frame."""
_last_call_ended = -float("inf")


@contextmanager
def silence(limit_s: float) -> Iterator[None]:
    """Declare that this process cannot send heartbeats during the `with` block, so that peers do not take it for dead.

    Args:
        limit_s: seconds by which the silence may exceed the peers' time-out.
    """
    global _last_call_ended
    call = _Call(limit_s)
    _calls.add(call)
    for listener in list(listeners):
        listener.tell_silence(limit_s)
    try:
        yield
    finally:
        _calls.discard(call)
        _last_call_ended = time.monotonic()


def longest_silence_s() -> float:
    """Time limit in seconds of the longest silent call that runs now; 0 if none runs."""
    return max((call.limit_s for call in list(_calls)), default=0.0)


class SignOfLife(ABC):
    """Something that is sent regularly, and announces silent calls while it is one of the `listeners`.

    Args:
        every_s: seconds between two of them.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._lock = threading.Lock()
        self._silence_s = 0.0

    def tell_silence(self, limit_s: float) -> None:
        """Announce a call during which this process may send no beat for up to `limit_s` seconds."""
        with self._lock:
            if limit_s > self._silence_s:
                self._announce(limit_s)

    @abstractmethod
    def _announce(self, silence_s: float) -> None:
        """Send, with the lock held, and keep in `_silence_s`, by how much the next sign of life may be late."""

    def _is_withdrawn(self) -> bool:
        """Whether a silence was announced, and no silent call runs or has ended a short time ago."""
        aside_s = BEATS_ASIDE * self._every_s
        return self._silence_s > 0 and not len(_calls) and time.monotonic() - _last_call_ended >= aside_s


class Heart(SignOfLife):
    """Sends a beat at most every `every_s` seconds, from any thread. It stops when the last reference is dropped.

    Args:
        send: called with the seconds by which the next beat may be later than usual; by one thread at a time.
        every_s: minimum seconds between two beats.
    """

    def __init__(self, send: Callable[[float], None], every_s: float) -> None:
        super().__init__(every_s)
        self._send = send
        self._last = -float("inf")
        self._stopped = False
        _hearts.add(self)
        listeners.add(self)

    def beat(self) -> None:
        """Send a beat, unless the last one was less than `every_s` seconds ago."""
        if time.monotonic() - self._last >= self._every_s:
            with self._lock:
                self._announce(0.0 if self._is_withdrawn() else self._silence_s)

    def stop(self) -> None:
        """Stop all beats, in any thread: the connection that they use is about to be closed."""
        with self._lock:
            self._stopped = True

    def _announce(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._last = time.monotonic()
        if not self._stopped:
            self._send(silence_s)


listeners: weakref.WeakSet[SignOfLife] = weakref.WeakSet()
"""Are told of silent calls before they start."""
_hearts: weakref.WeakSet[Heart] = weakref.WeakSet()


def beat() -> None:
    """Send a beat to every process that watches this one. Called regularly by waits."""
    for heart in list(_hearts):
        heart.beat()


def stop_hearts() -> None:
    """Stop all heartbeats of this process."""
    for heart in list(_hearts):
        heart.stop()


for _of_the_parent in (_calls.clear, listeners.clear, _hearts.clear):
    os.register_at_fork(after_in_child=_of_the_parent)
