"""What every test gets: one compute thread, the same seeds, no GPU tests without a GPU."""

from __future__ import annotations

import os

# Before torch is imported, and inherited by the ranks that tests spawn.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not os.path.exists("/dev/nvidia0"):  # before anything imports Triton, which other tests' libraries do
    os.environ.setdefault("TRITON_INTERPRET", "1")

import random
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings
from tqdm import tqdm

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started us in the background
torch.set_num_threads(1)
tqdm.monitor_interval = 0  # no thread of its own

# Reproducible and free of wall-clock limits; `--hypothesis-profile=explore` looks for new counterexamples.
settings.register_profile("ubatch", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("ubatch")

pytest.register_assert_rewrite("model_checks", "peer_failure_cases", "trtllm_cases")  # they assert for the tests

SECONDS_FOR_THREADS_TO_END = 5.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU; run `make test-gpu` on a machine that has one")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """The same random numbers in every test, whichever ran before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def no_thread_leaks() -> Iterator[None]:
    """Fail a test that leaves threads of its own behind."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + SECONDS_FOR_THREADS_TO_END
    while leaked := set(threading.enumerate()) - before:
        if time.monotonic() > deadline:
            pytest.fail(f"threads still running after the test: {sorted(thread.name for thread in leaked)}")
        time.sleep(0.01)
