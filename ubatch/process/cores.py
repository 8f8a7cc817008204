"""Number of cores for this process, by which every thread pool is sized."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Cores that the calling thread may run on: fewer than the machine has if it is pinned or in a container."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
