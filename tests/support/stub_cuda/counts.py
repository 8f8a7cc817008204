"""What the stub counted: launches, copies, waits of the host, captures, refusals; nothing where it is not loaded."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["counted", "counts", "is_loaded", "launches", "of", "summary"]

LAUNCHED = ("kernel", "triton", "cublas", "nccl ", "memcpy", "memset", "graph launch")
KINDS = (
    *LAUNCHED,
    "captured",
    "capture begin",
    "capture end",
    "module load",
    "tensor map",
    "malloc",
    "wait",
    "refused",
)

_library = ctypes.CDLL(None)


def is_loaded() -> bool:
    """Whether this process runs over the stub."""
    return hasattr(_library, "stub_cuda_report")


def counts() -> Counter[str]:
    """How often each thing happened in this process: `kernel NAME`, `captured memcpy D2D`, `wait stream`, ..."""
    found: Counter[str] = Counter()
    if is_loaded():
        report = _library.stub_cuda_report
        report.restype = ctypes.c_char_p
        for line in report().decode().splitlines():
            number, _, what = line.partition("\t")
            found[what] = int(number)
    return found


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count what happens inside; the counter is filled when it ends, and has no zeros."""
    before, found = counts(), Counter[str]()
    yield found
    found.update({what: number - before[what] for what, number in counts().items() if number != before[what]})


def of(found: Counter[str], *kinds: str) -> int:
    """How often something happened whose name begins with one of these."""
    return sum(number for what, number in found.items() if what.startswith(kinds))


def launches(found: Counter[str]) -> int:
    """Launches outside captures: kernels, products, collectives, copies, fillings, graphs."""
    return of(found, *LAUNCHED)


def summary(found: Counter[str]) -> dict[str, int]:
    """The same by kind."""
    return {kind.strip(): number for kind in KINDS if (number := of(found, kind))}
