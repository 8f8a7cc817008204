"""Freed memory is kept: a step that repeats takes no new pages."""

from __future__ import annotations

import resource
import sys
import threading

import pytest
import torch

from model_runner import keep_freed_memory


def step(x: torch.Tensor) -> None:
    """What a layer does: a few temporaries of one size, freed at its end."""
    y = torch.addcmul(x * 2, x.roll(32, dims=-1), x)
    (y + x).sum()


PAGES = 640  # of a temporary
STEPS = 20
# Given back, every temporary of every step would be mapped again: five times 640 pages, 20 times. A heap may still
# be trimmed now and then, so a few temporaries of a hundred are allowed.
FEW = 8 * PAGES


def faults_of(x: torch.Tensor) -> int:
    """The page faults of 20 steps, of this thread only: other tests' threads may still be ending."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(STEPS):
        step(x)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc, on Linux, keeps freed memory on request")
def test_repeated_steps_take_no_new_pages() -> None:
    if not keep_freed_memory():
        pytest.skip("only glibc keeps freed memory on request; this is another C library")
    assert keep_freed_memory()  # again is fine
    x = torch.randn(PAGES, 1024)  # 4 KiB a row
    faults_of(x)
    assert faults_of(x) < FEW

    # A lane's thread too, once it has taken its first steps.
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.extend(faults_of(x) for _ in range(2)))
    thread.start()
    thread.join()
    assert seen[1] < FEW
