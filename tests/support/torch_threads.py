"""Compute with another number of torch's threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


def on_threads(count: int, compute: Callable[[], Tensor]) -> Tensor:
    """Computed with so many threads, which end with it: this process is forked by other tests."""
    before = torch.get_num_threads()

    def body() -> Tensor:
        torch.set_num_threads(count)
        return compute()

    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(body).result()
    finally:
        torch.set_num_threads(before)
