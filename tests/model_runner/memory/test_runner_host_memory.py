"""Freed memory is kept: a step that repeats takes no new pages."""

import platform
import resource
import subprocess
import sys
import threading

import pytest
import torch
from repository import ROOT

from model_runner import keep_freed_memory


def step(x: torch.Tensor) -> None:
    """What a layer does: a few temporaries of one size, freed at its end."""
    y = torch.addcmul(x * 2, x.roll(32, dims=-1), x)
    (y + x).sum()


def faults_of(x: torch.Tensor, steps: int) -> int:
    """The page faults of some steps, of this thread only: other tests' threads may still be ending."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(steps):
        step(x)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


GLIBC = platform.libc_ver()[0] == "glibc"
needs_glibc = pytest.mark.skipif(not GLIBC, reason="only glibc, on Linux, keeps freed memory on request")


@pytest.mark.long
@needs_glibc
@pytest.mark.parametrize(("pages", "steps"), [(640, 20), (10_240, 4)], ids=["2.5 MiB", "40 MiB"])
def test_repeated_steps_take_no_new_pages(pages: int, steps: int) -> None:
    """Given back, five temporaries of every step would be mapped again. A heap may still be trimmed now and then, so a
    few temporaries of a hundred are allowed."""
    assert keep_freed_memory()  # again is fine
    x = torch.randn(pages, 1024)  # 4 KiB a row
    few = 5 * steps * pages * 8 // 100
    faults_of(x, steps)
    assert faults_of(x, steps) < few

    # A lane's thread too, once it has taken its first steps.
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.extend(faults_of(x, steps) for _ in range(2)))
    thread.start()
    thread.join()
    assert seen[1] < few


LASTING = """
import torch
from psutil import Process
from model_runner import keep_freed_memory
from model_runner.memory.host_memory import lasting_memory

keep_freed_memory()
steps = torch.full((160 << 20,), 1, dtype=torch.uint8)
del steps
with lasting_memory():
    weights = torch.full((160 << 20,), 1, dtype=torch.uint8)
held = Process().memory_info().rss
del weights
print(held - Process().memory_info().rss)
"""


@pytest.mark.wide
@needs_glibc
def test_what_lasts_goes_back_when_it_is_freed() -> None:
    """Weights of a model that was closed do not stay in the process, though steps have kept as much before."""
    done = subprocess.run([sys.executable, "-c", LASTING], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 150 << 20
