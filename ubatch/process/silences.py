"""Declared silences: calls during which this process cannot send a heartbeat, such as one that holds the GIL.

Code declares such a call by `silence`. Listeners, which send the signs of life, announce it before the call starts.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["listeners", "longest_silence_s", "silence", "silences_in_force"]


class _Call:
    """A call during which this process is silent."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s


class _Listener(Protocol):
    """Is told of silent calls before they start; weakly referenced."""

    def tell_silence(self, limit_s: float) -> None: ...


listeners: weakref.WeakSet[_Listener] = weakref.WeakSet()
_calls: weakref.WeakSet[_Call] = weakref.WeakSet()
"""The silent calls of this process. The entry of an interrupted call ends with its frame."""
_ended = -float("inf")


def longest_silence_s() -> float:
    """Time limit in seconds of the longest silent call that runs now; 0 if none runs."""
    return max((call.limit_s for call in list(_calls)), default=0.0)


def silences_in_force(aside_s: float) -> bool:
    """Whether a silent call is running, or was within the last `aside_s` seconds."""
    return len(_calls) > 0 or time.monotonic() - _ended < aside_s


@contextmanager
def silence(limit_s: float) -> Iterator[None]:
    """Declare that this process cannot send heartbeats during the `with` block, so that peers do not take it for dead.

    Args:
        limit_s: seconds by which the silence may exceed the peers' time-out.
    """
    global _ended
    call = _Call(limit_s)
    _calls.add(call)
    for listener in list(listeners):
        listener.tell_silence(limit_s)
    try:
        yield
    finally:
        _calls.discard(call)
        _ended = time.monotonic()


def _after_fork_in_child() -> None:
    global _calls, _ended
    listeners.clear()  # they belong to the parent process
    _calls, _ended = weakref.WeakSet(), -float("inf")


os.register_at_fork(after_in_child=_after_fork_in_child)
