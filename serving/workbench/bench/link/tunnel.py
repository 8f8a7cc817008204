"""A link with delay and rate between two TUN devices: two threads in C, which change both under open connections.

Python is too slow for it: a gigabit is thousands of packets a second, and Python's threads wait for each other.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ubatch.kernels import compile_c

_PRIORITY = 1
_END_S = 5.0


@dataclass(frozen=True)
class Speed:
    """Delay in microseconds and rate in Mbit/s, of each direction; a rate of 0 is unlimited. As text `500:600`."""

    delay_us: float
    mbit: float

    @classmethod
    def parse(cls, text: str) -> Speed:
        """Raises ValueError if the text is another."""
        delay, colon, rate = text.partition(":")
        try:
            speed = cls(float(delay), float(rate))
        except ValueError:
            colon, speed = "", cls(0, 0)
        if not colon or not (0 <= speed.delay_us < 1e6 and 0 <= speed.mbit < 1e6):
            raise ValueError(
                "expected DELAY:RATE, microseconds below a second and Mbit/s (0: unlimited), as in 500:600"
            )
        return speed

    def __str__(self) -> str:
        return f"{self.delay_us:g} us, {f'{self.mbit:g} Mbit/s' if self.mbit else 'unlimited'}"


class _Direction(ctypes.Structure):
    """As in `tunnel.c`."""

    _fields_ = (
        ("delay_ns", ctypes.c_int64),
        ("ns_per_byte", ctypes.c_double),
        ("ending", ctypes.c_int64),
        ("cut", ctypes.c_int64),
    )


class Tunnel:
    """Carries packets between two TUN devices, given by their open files, which it closes at the end.

    The threads have real-time priority where that is allowed: a network card does not wait for a core either.
    """

    def __init__(self, ends: tuple[int, int]) -> None:
        self._ends = ends
        self._directions = (_Direction(), _Direction())
        pairs = zip(ends, reversed(ends), self._directions, strict=True)
        self._threads = [threading.Thread(target=_carry, args=each, name="link", daemon=True) for each in pairs]
        for thread in self._threads:
            thread.start()

    def set(self, speed: Speed) -> None:
        """Change delay and rate of both directions; what is under way keeps its times."""
        for direction in self._directions:
            direction.delay_ns = int(speed.delay_us * 1e3)
            direction.ns_per_byte = 8e3 / speed.mbit if speed.mbit else 0.0

    def cut(self, *, cut: bool = True) -> None:
        """Lose all packets of both directions, or carry them again."""
        for direction in self._directions:
            direction.cut = cut

    def close(self) -> None:
        for direction in self._directions:
            direction.ending = 1
        for thread in self._threads:
            thread.join(_END_S)
        for end in self._ends:
            os.close(end)


@cache
def carrier() -> Any:
    """The loop in C. Raises ConfigError where nothing can be compiled."""
    source = Path(__file__).with_name("tunnel.c").read_text(encoding="utf-8")
    carry = compile_c(source, _GNU_SOURCE=1).ubatch_carry
    carry.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Direction))
    return carry


def _carry(source: int, target: int, direction: _Direction) -> None:
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    carrier()(source, target, ctypes.byref(direction))
