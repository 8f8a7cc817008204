"""Keeps freed memory in the process: on a CPU, a step should not get its tensors' pages from the kernel every time.

glibc returns large blocks to the kernel when they are freed, and gets new, zeroed pages for the next tensor of the same
size. Each page then costs a page fault, on a virtual machine some microseconds: there, rotary embeddings of 1,024
tokens alone took 9 ms instead of 0.25 ms. Steps allocate the same sizes again and again, so keeping freed memory helps:
a prefill of 1,024 tokens through 8 layers goes from thousands of faults per step to none. Lanes take turns, so threads
that have no arena of their own yet share the main one, and reuse memory that another lane freed.

Weights and caches are the exception: they live as long as their model. The large ones go back to the kernel when it is
closed (`lasting_memory`).
"""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -3, -4, -8
_KEPT = (
    (_M_MMAP_MAX, 0),  # no block is mapped by itself
    (_M_TRIM_THRESHOLD, -1),  # the heap's end is not given back
    (_M_TOP_PAD, 64 << 20),
    (_M_ARENA_MAX, 1),
)
_MAPPED = (
    (_M_MMAP_THRESHOLD, 32 << 20),  # the most that glibc accepts
    (_M_MMAP_MAX, 65_536),  # glibc's own number of mapped blocks
)


def keep_freed_memory() -> bool:
    """Set the C library to keep freed memory, for the whole process and all that it allocates.

    Returns:
        True if it was set (glibc); False on other systems, which work unchanged.
    """
    libc = _glibc()
    return libc is not None and _set(libc, _KEPT)


@contextmanager
def lasting_memory() -> Iterator[None]:
    """Make in the `with` block what lasts, behind it keep what is freed: see `keep_freed_memory`.

    Within, blocks of 32 MiB and more are mapped one by one, and go back to the kernel when they are freed, unless a
    hole in the heap is large enough for them. What steps have kept so far goes back first.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    keep_freed_memory()  # also before threads are made: they are to share an arena
    libc.malloc_trim(0)
    _set(libc, _MAPPED)
    try:
        yield
    finally:
        keep_freed_memory()


def _set(libc: ctypes.CDLL, settings: Sequence[tuple[int, int]]) -> bool:
    return all(libc.mallopt(name, value) == 1 for name, value in settings)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return libc if hasattr(libc, "gnu_get_libc_version") else None
