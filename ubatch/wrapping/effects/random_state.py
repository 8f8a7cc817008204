"""The states of the random generators that a call may draw from: torch's, Python's and numpy's own.

A state is read before and after every overlapped call, so reading must be cheap. Python and numpy build thousands of
objects to return their states; here their words are read from memory, where that is known to work. The whole state is
asked for only where the reading differs from the last one.
"""

from __future__ import annotations

import array
import ctypes
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

_THREADS_CLOCK = 6
"""The kernel's flags of a clock of one thread's processor time."""
_LOOK_S = 0.005
"""Seconds for which other threads are watched."""

_MT19937_BYTES = 2500
"""Size of numpy's `mt19937_state`: 624 words and a position."""


@dataclass
class _Source:
    """One generator.

    Attributes:
        read: something cheap that changes when numbers are drawn.
        get, set: the whole state.
        read_last, whole_last: the last reading for which the whole state was asked, and that state.
    """

    read: Callable[[], object]
    get: Callable[[], Any]
    set: Callable[[Any], object]
    read_last: object = None
    whole_last: Any = None

    def whole(self, reading: object) -> Any:
        """The whole state at `reading`."""
        if reading != self.read_last:
            self.read_last, self.whole_last = reading, self.get()
        return self.whole_last


class RandomState:
    """A snapshot of the generators' states."""

    def __init__(self) -> None:
        self._sources = _sources()
        self._readings = [source.read() for source in self._sources]
        self._wholes = [source.whole(read) for source, read in zip(self._sources, self._readings, strict=True)]

    def moved(self) -> bool:
        """Whether numbers have been drawn since, by any thread; also from a generator that was not in use before."""
        return [source.read() for source in _sources()] != self._readings

    def restore(self) -> None:
        """Restore these states."""
        for source, whole in zip(self._sources, self._wholes, strict=True):
            source.set(whole)


def busy_threads() -> dict[int, float]:
    """Processor time of every other thread, in seconds; empty where a system does not tell. Lanes do not count.

    The clock is named as Linux does, by the thread's number: to ask for that of a thread that has ended may crash.
    """
    own, times = threading.get_native_id(), dict[int, float]()
    for thread in threading.enumerate() if sys.platform == "linux" else ():
        number = thread.native_id
        if number is not None and number != own and not thread.name.startswith("ubatch-lane-"):
            with suppress(OSError):  # it has ended
                times[number] = time.clock_gettime((~number << 3) | _THREADS_CLOCK)
    return times


def others_are_busy() -> bool:
    """Whether another thread is at work now, which may be the one that draws random numbers."""
    before = busy_threads()
    time.sleep(_LOOK_S)
    return busy_threads() != before


def _sources() -> list[_Source]:
    """The generators in use. Those of numpy and CUDA may come later: not imported or initialised means not used."""
    numpy = sys.modules.get("numpy.random")
    if "numpy" not in _known and hasattr(numpy, "get_bit_generator"):  # another thread may be importing it
        _known["numpy"] = _numpy(numpy)
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():  # a capture forbids to ask
        for number, generator in enumerate(torch.cuda.default_generators):
            if number not in _known:
                _known[number] = _torch(generator)
        return list(_known.values())
    return [source for name, source in _known.items() if isinstance(name, str)]


def _torch(generator: torch.Generator) -> _Source:
    def read() -> bytes:
        state = generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())

    return _Source(read, generator.get_state, generator.set_state)


def _python() -> _Source:
    owner: Any = random.random.__self__  # type: ignore[attr-defined]
    start, size = object.__basicsize__, type(owner).__mro__[1].__basicsize__ - object.__basicsize__
    words = array.array("I", random.getstate()[1][:-1]).tobytes()

    def read() -> object:
        return ctypes.string_at(id(owner) + start, size), owner.gauss_next

    known = sys.implementation.name == "cpython" and words in ctypes.string_at(id(owner) + start, size)
    return _Source(read if known else random.getstate, random.getstate, random.setstate)


def _numpy(module: Any) -> _Source:
    def read() -> object:
        generator = module.get_bit_generator()
        if type(generator).__name__ == "MT19937":
            return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        return pickle.dumps(generator.state)

    return _Source(read, module.get_state, module.set_state)


_known: dict[object, _Source] = {"torch": _torch(torch.default_generator), "python": _python()}
