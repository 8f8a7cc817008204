"""Compiles the attention kernels for a GPU that need not be there, as a serving step would launch them.

    python compile_triton.py 90         prints a line per kernel: its name, and the bytes of shared memory it takes

The back end runs as always; only the launch is replaced, by Triton's `warmup`, which compiles and does not run. Not in
the interpreter, so in a process of its own.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
from attention_batches import make_batch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attention import AttentionShape, PagedKVCache
from attention.backends.triton import TritonAttentionBackend
from attention.kernels.cache import read_page_table
from attention.kernels.merge import merge_states
from attention.kernels.ragged import pad_ragged, unpad_ragged


class Nobody:
    """What Triton asks its driver for before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compile_instead(kernel: JITFunction, grid: Any) -> Any:
    """`kernel[grid]`, which does not launch."""

    def launch(*args: Any, **kwargs: Any) -> None:
        print(kernel.fn.__name__, kernel.warmup(*args, grid=grid, **kwargs).metadata.shared)

    return launch


def compile_step(shape: AttentionShape, requests: list[tuple[int, int]], **options: Any) -> None:
    batch = make_batch(requests, shape=shape, block_size=16, padding=1, **options)
    cache = PagedKVCache(replace(batch.spec, dtype=torch.bfloat16), batch.num_blocks)
    plan = TritonAttentionBackend(shape, cache).plan(batch.metadata)
    plan.forward(batch.q.bfloat16(), batch.k.bfloat16(), batch.v.bfloat16(), 0, batch.sinks)


def main(capability: int) -> None:
    triton.runtime.driver.set_active(Nobody(capability))
    JITFunction.__getitem__ = compile_instead
    every_option = {"scale": 0.2, "sliding_window": 100, "soft_cap": 5.0, "sinks": True}
    compile_step(AttentionShape(16, 4, 128), [(300, 1), (20, 40)])
    compile_step(AttentionShape(16, 2, 64, **every_option), [(300, 6), (20, 6)], drafts="tree", fp8=capability >= 89)
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    x = torch.zeros(8, 4, 64, dtype=torch.bfloat16)
    unpad_ragged(pad_ragged(x, starts, 5), starts, 8)
    merge_states(x, torch.zeros(8, 4), x, torch.zeros(8, 4))
    read_page_table(torch.zeros(2, 4, dtype=torch.int32), torch.zeros(4, 64, dtype=torch.int32), starts, starts, 16)


if __name__ == "__main__":
    main(int(sys.argv[1]))
