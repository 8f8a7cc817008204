"""Where parked lanes wait on a GPU: on the core that the caller has just left.

To wake a thread on another core costs tens of microseconds, on the same core a few. A lane that runs may use every core
it could use before, because the threads that it starts (of OpenMP, of NCCL, of compilers) inherit its cores. So only a
lane that is parked is bound, to the core on which the step began:

    park        bound to that core
    wake up     on that core, which the other lane leaves; then free again, and seldom moved by the scheduler

That takes two system calls per hand-off, a few microseconds. On a CPU the rank has one core from the beginning.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache


class OneCore:
    """Two masks: of the caller's core, and of all cores that its threads may use.

    Args:
        core: number of the core that parked lanes wait on.
        free: numbers of the cores that a running lane may use.
    """

    __slots__ = ("_free", "_parked", "_set", "_size")

    def __init__(self, core: int, free: frozenset[int]) -> None:
        self._set = _libc().sched_setaffinity
        self._size = max(free) // 8 + 1 + -(max(free) // 8 + 1) % 8  # whole words
        self._parked, self._free = self._mask(frozenset((core,))), self._mask(free)

    def park(self) -> None:
        """Bind the calling thread to the core."""
        self._set(0, self._size, self._parked)

    def go_on(self) -> None:
        """Let the calling thread run on every core again."""
        self._set(0, self._size, self._free)

    def _mask(self, cores: frozenset[int]) -> bytes:
        return sum(1 << core for core in cores).to_bytes(self._size, "little")


def one_core() -> OneCore | None:
    """Masks for the core that this thread runs on; None where threads have no masks, or only one core."""
    if not hasattr(os, "sched_setaffinity") or sys.byteorder != "little":
        return None
    free = frozenset(os.sched_getaffinity(0))
    core = _libc().sched_getcpu()
    return _kept(core, free) if len(free) > 1 and core in free else None


_kept = cache(OneCore)


@cache
def _libc() -> ctypes.PyDLL:
    """The C library, called without giving up Python's lock: a call takes less time than that would."""
    return ctypes.PyDLL(None)
