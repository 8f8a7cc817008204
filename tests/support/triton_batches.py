"""Batches where Triton's kernels run: on the GPU, compiled, or else here, in its interpreter, a millisecond a program.

Import this before anything that imports Triton, which reads TRITON_INTERPRET only then.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_batches import Batch
from torch import Tensor

from attention import PagedKVCache, SpecVerifyInput

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")


def moved(x: Any) -> Any:
    """A dataclass with its tensors on that device."""
    fields = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    there = {name: value.to(DEVICE) for name, value in fields.items() if isinstance(value, Tensor)}
    there |= {name: moved(value) for name, value in fields.items() if isinstance(value, SpecVerifyInput)}
    return replace(x, **there)


def moved_cache(batch: Batch, dtype: torch.dtype = torch.float32) -> PagedKVCache:
    """`batch.new_cache()`, there and in that dtype."""
    here = batch.new_cache()
    there = PagedKVCache(replace(batch.spec, dtype=dtype), batch.num_blocks, DEVICE)
    for source, target in ((here.key_pool, there.key_pool), (here.value_pool, there.value_pool)):
        target.memory.copy_(source.memory)
        target.scales[:] = source.scales
    return there


def numbers(stored: Tensor) -> Tensor:
    """What a pool stores, as numbers on the CPU: the bytes of fp8 have two zeros."""
    stored = stored.cpu()
    return stored.view(torch.float8_e4m3fn).float() if stored.dtype == torch.uint8 else stored
