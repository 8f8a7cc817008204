"""Launches of this project's own against Triton's: the first of every kernel is made twice, and compared.

The grid, the block, shared memory, the stream, and every byte of every parameter, tensor maps included; see
`ubatch.kernels.quick_launch`. A difference ends the process, so that nobody takes it for a failure of something else.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

__all__ = ["DIFFERENT", "compare_launches"]

DIFFERENT = 70
"""Exit status of a process in which launches differed."""
LEAST_PARAMETERS = 2
"""Of every kernel: Triton adds two. A launch without them was not read."""

_library = ctypes.CDLL(None)


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
