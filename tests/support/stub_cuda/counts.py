"""What the stub counted: launches, copies, waits of the host, captures, refusals; empty where it is not loaded."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["counted", "counts", "is_loaded", "launches", "of", "reset"]

LAUNCHED = ("kernel", "triton", "cublas", "nccl", "memcpy", "memset", "graph launch")

_library = ctypes.CDLL(None)


def is_loaded() -> bool:
    """Whether this process runs over the stub."""
    return hasattr(_library, "stub_cuda_report")


def counts() -> Counter[str]:
    """How often each thing happened since the last reset: `kernel NAME`, `captured memcpy D2D`, `wait stream`, ..."""
    found: Counter[str] = Counter()
    if is_loaded():
        report = _library.stub_cuda_report
        report.restype = ctypes.c_char_p
        for line in report().decode().splitlines():
            number, _, what = line.partition("\t")
            found[what] = int(number)
    return found


def reset() -> None:
    """Count from zero."""
    _library.stub_cuda_reset()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count what happens inside; the counter is filled when it ends."""
    before, found = counts(), Counter[str]()
    yield found
    found.update(counts())
    found.subtract(before)
    for what in [what for what, number in found.items() if not number]:
        del found[what]


def of(found: Counter[str], *kinds: str) -> int:
    """How often something happened whose name begins with one of these."""
    return sum(number for what, number in found.items() if what.startswith(kinds))


def launches(found: Counter[str]) -> int:
    """Launches outside captures: kernels, products, collectives, copies, fillings, graphs."""
    return of(found, *LAUNCHED)
