"""Parts of one operation on several cores of a CPU, each a loop of small torch operations.

torch spreads every operation over its threads by itself. Where operations are short that is waste: the products of one
expert in a decode step take 50 us, and starting and joining the threads for each costs as much as the second core
saves (on two cores of a virtual machine 62 ms a step, against 38 ms when either core takes half of the experts). So the
loop is cut instead: part 0 runs here, the others in threads that are kept, each with a single compute thread.

They compute only while the thread that called waits for them. So a lane that holds the baton holds it for them, too.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch

__all__ = ["compute_threads", "run_parts"]


def compute_threads() -> int:
    """Into how many parts it pays to cut: the threads that torch would use here, at most one for each core.

    1 where torch was not built with OpenMP, or it cannot be told what it is told here.
    """
    threads = torch.get_num_threads()
    return min(threads, _cores()) if threads > 1 and _openmp() is not None else 1


def run_parts(parts: Sequence[Callable[[], None]]) -> None:
    """Run all parts at the same time; they must not depend on each other, nor need gradients.

    Grad and inference mode are those of the caller. Returns, or raises what a part raised, when all have ended.
    """
    if len(parts) == 1:
        parts[0]()
        return
    inference = torch.is_inference_mode_enabled()
    futures: list[Future[None]] = []
    with _single_threaded():
        try:
            futures += [_pool().submit(_run, part, inference) for part in parts[1:]]
            parts[0]()
        finally:
            wait(futures)
    for future in futures:
        future.result()


def _run(part: Callable[[], None], inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        part()


@contextmanager
def _single_threaded() -> Iterator[None]:
    """One compute thread, in this thread alone; `torch.set_num_threads` would set it for others, too."""
    openmp = _openmp()
    if openmp is None:
        yield
        return
    threads = torch.get_num_threads()
    openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(threads)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch computes with, if it lets a thread choose its own number of threads."""
    try:
        library = ctypes.CDLL(None)
        choose, before = library.omp_set_num_threads, torch.get_num_threads()
    except (AttributeError, OSError, TypeError):
        return None
    choose(before + 1)  # a process may have loaded several
    is_the_one = torch.get_num_threads() == before + 1
    choose(before)
    return library if is_the_one else None


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """One per process; it starts a thread when all that it has are busy."""
    return ThreadPoolExecutor(max(1, _cores() - 1), "ubatch-compute", initializer=_begin_thread)


def _begin_thread() -> None:
    openmp = _openmp()
    torch.get_num_threads()  # torch sets a new thread's number when it is first asked
    if openmp is not None:
        openmp.omp_set_num_threads(1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # its threads are the parent's
