"""What the stub counted: launches, copies, waits of the host, captures, refusals; nothing where it is not loaded.

And launches of this project's own against Triton's: the first of every kernel is made twice, and compared: the grid,
the block, shared memory, the stream, and every byte of every parameter, tensor maps included; see
`ubatch.kernels.quick_launch`. A difference ends the process, so that nobody takes it for a failure of something else.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

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

DIFFERENT = 70
"""Exit status of a process in which launches differed."""
LEAST_PARAMETERS = 2
"""Of every kernel: Triton adds two. A launch without them was not read."""

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


def _noted(launch: Callable[[], Any]) -> tuple[Any, str]:
    """What a launch returns, and what it passed, as text; see `parameters.cpp`."""
    passed = _library.stub_cuda_last_launch
    passed.restype = ctypes.c_char_p
    _library.stub_cuda_note_launches(True)
    try:
        return launch(), passed().decode()
    finally:
        _library.stub_cuda_note_launches(False)


def compare_launches(*, every: bool = False) -> Counter[str]:
    """Compare from now on; the counter has the number of launches that were compared, by the kernel's name.

    Args:
        every: all launches of a kernel, not the first one only.
    """
    import ubatch.kernels.quick_launch as quick_launch

    compared: Counter[str] = Counter()
    made = quick_launch.direct_launch

    @wraps(made)
    def direct_launch(kernel: Any) -> Callable[..., int] | None:
        direct = made(kernel)
        if direct is None:
            return None
        own, waiting = direct, [True]

        def launch(x: int, y: int, z: int, stream: int, *arguments: Any) -> int:
            if not waiting or not x * y * z:
                return own(x, y, z, stream, *arguments)
            rest = kernel.function, kernel.packed_metadata, None, None, None
            _, theirs = _noted(lambda: kernel.run(x, y, z, stream, *rest, *arguments))
            status, ours = _noted(lambda: own(x, y, z, stream, *arguments))
            if status == 0:
                if ours != theirs or theirs.count("\n") < LEAST_PARAMETERS:
                    print(f"Triton passed\n{theirs}\n\nand this project\n{ours}", file=sys.stderr, flush=True)
                    os._exit(DIFFERENT)
                compared[kernel.name] += 1
                if not every:
                    waiting.clear()
            return status

        return launch

    quick_launch.direct_launch = direct_launch
    return compared
