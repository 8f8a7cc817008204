"""Which cores a part of a measurement has."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from contextlib import contextmanager


def split_cores() -> tuple[Set[int], Set[int]]:
    """One core of those that this thread has, and the others: the same if it has one. Both are empty where threads have
    no masks."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    one = set(sorted(cores)[-1:])
    return one, cores - one or one


@contextmanager
def on_cores(cores: Set[int]) -> Iterator[None]:
    """Run the block, and what it starts, on these cores; on any if there are none."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
