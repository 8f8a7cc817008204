"""Keeping freed memory: on a CPU, a step's tensors should not come fresh from the kernel every time.

glibc gives large blocks back when they are freed, and takes new, zeroed pages for the next tensor of the same size.
Each page then costs a fault, and on a virtual machine a fault costs microseconds: there, rotary embeddings of 1,024
tokens alone took 9 ms instead of 0.25 ms. A step asks for the same sizes again and again, so what it freed is worth
keeping: a prefill of 1,024 tokens through 8 layers goes from thousands of faults per step to none. Lanes take turns, so
threads that have no arena of their own yet share the main one, and find warm what another lane freed.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_SETTINGS = (
    (_M_MMAP_THRESHOLD, 32 << 20),  # the most glibc accepts; larger tensors are still mapped one by one
    (_M_TRIM_THRESHOLD, 2**31 - 1),
    (_M_TOP_PAD, 64 << 20),
    (_M_ARENA_MAX, 1),
)


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory, for the whole process; calling it again changes nothing.

    Returns:
        Whether it was told: True with glibc, False elsewhere, where nothing is changed and everything still works.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return all(libc.mallopt(name, value) == 1 for name, value in _SETTINGS)
