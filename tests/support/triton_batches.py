"""Batches where Triton's kernels run: on the GPU, compiled, or else here, in its interpreter, a millisecond a program.

Import this before anything that imports Triton, which reads TRITON_INTERPRET only then.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from attention_batches import Batch, mapped
from torch import Tensor

from attention import PagedKVCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")


def moved(x: Any) -> Any:
    """A dataclass with its tensors on that device."""
    return mapped(x, lambda tensor: tensor.to(DEVICE))


def moved_cache(batch: Batch, dtype: torch.dtype = torch.float32) -> PagedKVCache:
    """`batch.new_cache()`, there and in that dtype."""
    cache: PagedKVCache = batch.to(dtype).on(DEVICE).new_cache()
    return cache


def numbers(stored: Tensor) -> Tensor:
    """What a pool stores, as numbers on the CPU: the bytes of fp8 have two zeros."""
    stored = stored.cpu()
    return stored.view(torch.float8_e4m3fn).float() if stored.dtype == torch.uint8 else stored
