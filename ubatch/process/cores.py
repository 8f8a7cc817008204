"""How many cores there are for this process: every pool of threads is sized by it."""

from __future__ import annotations

import os

__all__ = ["num_cores"]


def num_cores() -> int:
    """Cores that the calling thread may run on; not all that the machine has, where it is pinned or in a container."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
