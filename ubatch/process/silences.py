"""Declared silences: calls that keep this process from giving a sign of life, such as one that holds Python's lock.

Whoever makes such a call says so before, by `silence`; whoever gives signs of life listens, and tells those who wait.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["hear_no_more", "hear_silences", "longest_silence_s", "silence", "silences_in_force"]


class _Call:
    """A call that keeps this process silent."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s


class _Silences:
    """The silent calls of this process. One that an interrupt left open goes with its frame."""

    def __init__(self) -> None:
        self.calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        self.ended = -float("inf")

    def in_force(self, aside_s: float) -> bool:
        return len(self.calls) > 0 or time.monotonic() - self.ended < aside_s


class _Listener(Protocol):
    """Hears of calls that keep this process silent; held weakly."""

    def tell_silence(self, limit_s: float) -> None: ...


_silences = _Silences()
_listeners: weakref.WeakSet[_Listener] = weakref.WeakSet()


def hear_silences(listener: _Listener) -> None:
    """Tell it before every `silence` from now on."""
    _listeners.add(listener)


def hear_no_more(listener: _Listener) -> None:
    """Tell it no more."""
    _listeners.discard(listener)


def longest_silence_s() -> float:
    """How long the longest of the calls that run now may take; 0 without one."""
    return max((call.limit_s for call in list(_silences.calls)), default=0.0)


def silences_in_force(aside_s: float) -> bool:
    """Whether a silent call is running, or was within the last `aside_s` seconds."""
    return _silences.in_force(aside_s)


@contextmanager
def silence(limit_s: float) -> Iterator[None]:
    """Let no peer take this process for dead in the `with` block, because its watches cannot beat.

    Args:
        limit_s: so much longer than their time-out at most.
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
    _listeners.clear()  # they are the parent's
    _silences = _Silences()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
