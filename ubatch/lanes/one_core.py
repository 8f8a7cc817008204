"""Where lanes run on a GPU: all on the core that the caller has just left.

To wake a thread on another core costs tens of microseconds, on the same core a few. Only one lane runs at a time, so
lanes lose little by sharing a core. They are bound to it from the beginning of a step to its end, and free between
steps. What a bound lane starts inherits the core, and what asks for the thread's cores sees one. So a lane is free

    in early steps      of each kind, until `QUIET_STEPS` have left no new thread; and again after one that has
    in patient steps    those without the hang check: warm-up, compilation, capture
    from a call on      that takes long: compilers, tuning (`ubatch.ranks.long_calls`); to the end of the step
    once it hangs       the caller frees the threads that it abandons
    in a forked child

A thread that a bound lane has left all the same is freed when the step ends. What cannot be mended: a process that such
a lane has started (not by a fork) keeps the core, and a library that has asked for the cores keeps the answer. On a CPU
the rank has one core from the beginning.
"""

import ctypes
import os
from collections.abc import Hashable, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

QUIET_STEPS = 8
"""Steps of a kind that leave no new thread, before lanes are bound."""
_TASKS = "/proc/self/task"


@dataclass(frozen=True, slots=True)
class OneCore:
    """The core of a step.

    Attributes:
        core: its number, as a mask.
        every: numbers of all cores that the caller's threads may use.
    """

    core: frozenset[int]
    every: frozenset[int]

    def bind(self) -> None:
        """Bind the calling thread to the core."""
        _set_cores(0, self.core)

    def free(self, thread: int = 0) -> None:
        """Let a thread run on every core again, if it is bound to the core. 0 is the calling one."""
        with suppress(OSError):  # it has ended
            if os.sched_getaffinity(thread) == self.core:
                _set_cores(thread, self.every)


class CoreOfSteps:
    """Whether the lanes of a crew share a core, step by step."""

    def __init__(self) -> None:
        self._quiet_steps: dict[Hashable, int] = {}
        self._kind: Hashable = None
        self._threads = _all_threads()
        self._core: OneCore | None = None  # of a step that has not ended

    def begin_step(self, kind: Hashable, *, patient: bool) -> OneCore | None:
        """The core of a step that begins; None if its lanes are free.

        Args:
            kind: what decides which code runs: the schedule and the modes.
        """
        if self._core is not None:  # the last step could not be ended
            self.end_step()
        self._kind = kind
        if self._core is None and not patient and self._quiet_steps.get(kind, 0) >= QUIET_STEPS:
            self._core = one_core()
            return self._core
        return None

    def end_step(self) -> None:
        """Free the threads that the step has left, if its lanes were bound."""
        quiet = True
        while new := (threads := _all_threads()) - self._threads:  # until they have started no others meanwhile
            quiet = False
            self._quiet_steps.clear()
            if self._core is None:
                break
            for thread in new:
                self._core.free(thread)
            self._threads |= new
        if not threads:
            self._quiet_steps.clear()
            return
        self._threads, self._core = threads, None
        if quiet:
            self._quiet_steps[self._kind] = self._quiet_steps.get(self._kind, 0) + 1


def _all_threads() -> Set[int]:
    """The threads of this process, by their numbers (`threading.get_native_id`); none if they cannot be listed."""
    with suppress(OSError):
        return frozenset(map(int, os.listdir(_TASKS)))
    return frozenset()


def _set_cores(thread: int, cores: Set[int]) -> None:
    with suppress(OSError):  # it has ended, or the system has taken these cores away: then it runs where it may
        os.sched_setaffinity(thread, cores)


def one_core() -> OneCore | None:
    """The core that this thread runs on; None where threads cannot be bound, or have only one core."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    every = frozenset(os.sched_getaffinity(0))
    core = _libc().sched_getcpu()
    return OneCore(frozenset((core,)), every) if len(every) > 1 and core in every else None


@cache
def _libc() -> ctypes.PyDLL:
    """The C library, called without giving up Python's lock: a call takes less time than that would."""
    return ctypes.PyDLL(None)
