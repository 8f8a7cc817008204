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

__all__ = ["add_silence_listener", "longest_silence_s", "remove_silence_listener", "silence", "silences_in_force"]


class _Call:
    """A call during which this process is silent."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s


class _Silences:
    """The silent calls of this process. The entry of an interrupted call ends with its frame."""

    def __init__(self) -> None:
        self.calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        self.ended = -float("inf")

    def in_force(self, aside_s: float) -> bool:
        return len(self.calls) > 0 or time.monotonic() - self.ended < aside_s


class _Listener(Protocol):
    """Is told of silent calls before they start; weakly referenced."""

    def tell_silence(self, limit_s: float) -> None: ...


_silences = _Silences()
_listeners: weakref.WeakSet[_Listener] = weakref.WeakSet()


def add_silence_listener(listener: _Listener) -> None:
    """Notify `listener` before every `silence` from now on."""
    _listeners.add(listener)


def remove_silence_listener(listener: _Listener) -> None:
    """Stop notifying `listener`."""
    _listeners.discard(listener)


def longest_silence_s() -> float:
    """Time limit in seconds of the longest silent call that runs now; 0 if none runs."""
    return max((call.limit_s for call in list(_silences.calls)), default=0.0)


def silences_in_force(aside_s: float) -> bool:
    """Whether a silent call is running, or was within the last `aside_s` seconds."""
    return _silences.in_force(aside_s)


@contextmanager
def silence(limit_s: float) -> Iterator[None]:
    """Declare that this process cannot send heartbeats during the `with` block, so that peers do not take it for dead.

    Args:
        limit_s: seconds by which the silence may exceed the peers' time-out.
    """
    call = _Call(limit_s)
    _silences.calls.add(call)
    for listener in list(_listeners):
        listener.tell_silence(limit_s)
    try:
        yield
    finally:
        _silences.calls.discard(call)
        _silences.ended = time.monotonic()


def _after_fork_in_child() -> None:
    global _silences
    _listeners.clear()  # they belong to the parent process
    _silences = _Silences()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
