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


def faults_of(steps: int, x: torch.Tensor) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        step(x)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc can be told")
def test_repeated_steps_take_no_new_pages() -> None:
    if not keep_freed_memory():
        pytest.skip("this C library cannot be told")
    assert keep_freed_memory()  # again is fine
    x = torch.randn(1024, 640)  # 640 pages
    faults_of(20, x)
    assert faults_of(20, x) < 640  # tens of thousands otherwise

    # A lane's thread too, once it has taken its first steps.
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.extend(faults_of(20, x) for _ in range(2)))
    thread.start()
    thread.join()
    assert seen[1] < 640
