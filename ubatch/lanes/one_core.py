"""Where lanes run on a GPU: all on the core that the caller has just left.

To wake a thread on another core costs tens of microseconds, on the same core a few. Only one lane runs at a time, so
they lose nothing by sharing a core. They are bound to it from the step's begin to its end, and free between steps. To
bind them anew at every hand-off took ten microseconds of each: the kernel's code for it is cold.

A thread that a lane starts meanwhile (of OpenMP, of NCCL) inherits the core. It is freed at the step's end. A step that
runs without the hang check (warm-up, compilation, capture) starts most of them, and binds nothing. On a CPU the rank
has one core from the beginning.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Set
from contextlib import suppress
from functools import cache

_TASKS = "/proc/self/task"


class OneCore:
    """The core of a step.

    Args:
        core: its number.
        free: numbers of all cores that the caller's threads may use.
    """

    __slots__ = ("_core", "_free")

    def __init__(self, core: int, free: frozenset[int]) -> None:
        self._core, self._free = frozenset((core,)), free

    def bind(self) -> None:
        """Bind the calling thread to the core."""
        _bind(0, self._core)

    def free(self) -> None:
        """Let the calling thread run on every core again."""
        _bind(0, self._free)

    def free_new_threads(self, known: Set[int]) -> None:
        """The same for threads of this process that are bound to the core, but for those `known`."""
        for thread in all_threads() - known:
            with suppress(OSError):  # it has ended
                if os.sched_getaffinity(thread) == self._core:
                    _bind(thread, self._free)


def _bind(thread: int, cores: Set[int]) -> None:
    with suppress(OSError):  # it has ended, or the system has taken these cores away: then it runs where it may
        os.sched_setaffinity(thread, cores)


def all_threads() -> set[int]:
    """The threads of this process, by their numbers (`threading.get_native_id`)."""
    return {*map(int, os.listdir(_TASKS))}


def one_core() -> OneCore | None:
    """The core that this thread runs on; None where threads cannot be bound, or have only one core."""
    if not hasattr(os, "sched_setaffinity") or not os.path.isdir(_TASKS):
        return None
    free = frozenset(os.sched_getaffinity(0))
    core = _libc().sched_getcpu()
    return _kept(core, free) if len(free) > 1 and core in free else None


_kept = cache(OneCore)


@cache
def _libc() -> ctypes.PyDLL:
    """The C library, called without giving up Python's lock: a call takes less time than that would."""
    return ctypes.PyDLL(None)
