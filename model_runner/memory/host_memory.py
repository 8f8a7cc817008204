"""Keeps freed memory in the process: on a CPU, a step should not get its tensors' pages from the kernel every time.

glibc returns large blocks to the kernel when they are freed, and gets new, zeroed pages for the next tensor of the same
size. Each page then costs a page fault, on a virtual machine some microseconds: there, rotary embeddings of 1,024
tokens alone took 9 ms instead of 0.25 ms. Steps allocate the same sizes again and again, so keeping freed memory helps:
a prefill of 1,024 tokens through 8 layers goes from thousands of faults per step to none. Lanes take turns, so threads
that have no arena of their own yet share the main one, and reuse memory that another lane freed.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_SETTINGS = (
    (_M_MMAP_THRESHOLD, 32 << 20),  # the most glibc accepts; larger tensors are still mapped one by one
    (_M_TRIM_THRESHOLD, 2**31 - 1),
    (_M_TOP_PAD, 64 << 20),
    (_M_ARENA_MAX, 1),
)


def keep_freed_memory() -> bool:
    """Set the C library to keep freed memory, for the whole process; a second call changes nothing.

    Returns:
        True if it was set (glibc); False on other systems, which work unchanged.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return all(libc.mallopt(name, value) == 1 for name, value in _SETTINGS)
