"""Compiles the kernels of attention, routing and models for a GPU that need not be there, as a step would launch them.

    python compile_triton.py 90         prints a line per kernel: its name, the bytes of shared memory it takes, the
                                        tiles' loads that stay in flight while it waits for one, and how it was tuned
    python compile_triton.py 90 all     with every tile that tuning may choose; minutes

The launchers run as always; only the launch is replaced, by Triton's `warmup`, which compiles and does not run. Not in
the interpreter, so in a process of its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from attention_batches import make_batch, make_mla_batch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attention import (
    AttentionShape,
    CommonAttentionMetadata,
    GatedDeltaShape,
    GraphLimits,
    MLAKVCache,
    MLAShape,
    PagedKVCache,
    StatePool,
)
from attention.backends.triton.mha import TritonAttentionBackend
from attention.backends.triton.mla import TritonMLABackend
from attention.graph_buffers import GraphBuffers
from attention.kernels import tuning
from attention.kernels.fill import fill_batch
from attention.kernels.pages import list_pages
from attention.kernels.ragged import pad_ragged, unpad_ragged
from attention.linear.plan import LinearPlan
from attention.linear.triton_plan import LinearRecords, TritonLinearPlan
from model_runner.kernels.activation import sigmoid_mul, silu_mul
from model_runner.kernels.norm import add_rms_norm, rms_norm
from model_runner.kernels.place import place_lane
from model_runner.kernels.resolve import resolve_tokens, store_tokens
from model_runner.kernels.rope import rotate_heads
from moe.kernels.router import route_topk
from ubatch import ForwardMode

BF16 = torch.bfloat16
DEEPSEEK = MLAShape(16, 512, 128, 64, 128)
QWEN3_NEXT = GatedDeltaShape(16, 32, 128, 128, 4)

how = "-"
"""What `compile_instead` prints last, without spaces."""


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
        compiled = kernel.warmup(*args, grid=grid, **kwargs)
        in_flight = max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", compiled.asm["ptx"])), default=0)
        print(kernel.fn.__name__, compiled.metadata.shared, in_flight, how, flush=True)

    return launch


@contextmanager
def chosen(function: str, choice: Any, *numbers: int) -> Iterator[None]:
    """Tuning, whose `function` has but one choice, `numbers` for short."""
    global how
    before, how = getattr(tuning, function), "/".join(map(str, numbers))
    setattr(tuning, function, lambda *args, **options: [choice])
    try:
        yield
    finally:
        setattr(tuning, function, before)
        how = "-"


def compile_step(shape: AttentionShape, requests: list[tuple[int, int]], **options: Any) -> None:
    batch = make_batch(requests, shape=shape, block_size=16, padding=1, **options)
    cache = PagedKVCache(replace(batch.spec, dtype=BF16), batch.num_blocks)
    plan = TritonAttentionBackend(shape, cache).plan(batch.metadata)
    plan.forward(batch.q.bfloat16(), batch.k.bfloat16(), batch.v.bfloat16(), 0, batch.sinks)


def compile_latent_step(shape: MLAShape, requests: list[tuple[int, int]], **options: Any) -> None:
    batch = make_mla_batch(requests, shape=shape, block_size=64, padding=1, **options).to(BF16)
    cache = MLAKVCache(batch.spec, batch.num_blocks)
    TritonMLABackend(shape, cache).plan(batch.metadata).forward(batch.inputs, 0)


def compile_choices(*, fp8: bool) -> None:
    """Every tile that tuning may choose for Qwen3's and DeepSeek's attention."""
    for head_dim in (128, 256):
        shape = AttentionShape(32, 4, head_dim)
        for choice in tuning.decode_choices(shape, 1, BF16, fp8=fp8):
            if choice.waves == 2:
                with chosen("decode_choices", choice, choice.keys, choice.num_warps, choice.num_stages):
                    compile_step(shape, [(400, 1)], fp8=fp8)
        for size in tuning.prefill_choices(shape, BF16):
            with chosen("prefill_choices", size, size.rows, size.keys, size.num_warps, size.num_stages):
                compile_step(shape, [(20, 40)], fp8=fp8)
    latent = replace(DEEPSEEK, num_heads=64)
    for choice in tuning.latent_choices(latent, 1, BF16):
        if choice.waves == 1:
            numbers = (choice.rows, choice.keys, choice.num_warps, choice.num_stages)
            with chosen("latent_choices", choice, *numbers):
                compile_latent_step(latent, [(400, 1)], fp8=fp8)


def compile_linear(shape: GatedDeltaShape) -> None:
    """Linear attention of a prompt with decodes, and of a verify step behind another one, as in a graph."""
    pool = StatePool(shape, 1, 4, BF16, torch.device("cpu"), num_drafts=3)
    conv, heads = torch.zeros(shape.conv_kernel, shape.conv_dim), torch.zeros(shape.num_v_heads)

    def run(plan: LinearPlan, tokens: int) -> None:
        sizes = shape.conv_dim, shape.value_size, shape.num_v_heads, shape.num_v_heads
        qkv, _, b, a = torch.zeros(tokens, sum(sizes), dtype=BF16).split(sizes, dim=-1)
        plan.forward(qkv, *plan.gates(a, b, heads, heads), conv, 0)

    def batch(lens: list[int], mode: ForwardMode) -> CommonAttentionMetadata:
        table, slots = torch.zeros(len(lens), 1, dtype=torch.int32), torch.zeros(sum(lens), dtype=torch.int64)
        return CommonAttentionMetadata.build(lens, lens, table, slots, mode, state_slots=range(len(lens)))

    for length in (100, 25):  # chunks of 64, and of 32, which GPUs with less shared memory have
        run(TritonLinearPlan(pool, batch([length, 1, 5], ForwardMode.MIXED)), length + 6)
    for lens, mode in (([1, 1], ForwardMode.DECODE), ([4, 4], ForwardMode.TARGET_VERIFY)):
        run(LinearRecords(pool, 2).plan_for_graph(batch(lens, mode)), sum(lens))


def compile_models() -> None:
    """Routers, norms, rope and activation."""
    logits, bias, real = torch.zeros(70, 256, dtype=BF16), torch.zeros(256), torch.tensor([60])
    route_topk(logits[:, :128], 8, renormalize=True)
    route_topk(logits[:, :160], 6, num_groups=8, top_groups=3, scale=16.0, num_tokens=60)
    route_topk(logits, 8, sigmoid=True, bias=bias, num_groups=8, top_groups=4, scale=2.5, num_tokens=real)
    x, weight = torch.zeros(3, 7168, dtype=BF16), torch.zeros(7168, dtype=BF16)
    silu_mul(x)
    sigmoid_mul(x, x)
    sigmoid_mul(x[:, :1], x)
    rms_norm(x, weight, 1e-6)
    add_rms_norm(x, x, weight, 1e-6)
    heads, angles = torch.zeros(3, 40, 128, dtype=BF16), torch.zeros(3, 1, 128, dtype=BF16)
    rotate_heads(heads[:, :36], angles, angles, torch.zeros(36, 128, dtype=BF16), 1e-6)
    rotate_heads(heads[:, :36], angles, angles)
    half = torch.zeros(3, 1, 64, dtype=BF16)  # GLM-4.5
    rotate_heads(heads, half, half, torch.zeros(40, 128, dtype=BF16), 1e-6)


def compile_steps() -> None:
    """What a step is made of on the device, in graphs and without."""
    numbers = torch.zeros(70, dtype=torch.int64)
    resolve_tokens(numbers, numbers)
    store_tokens(numbers, numbers, numbers)
    place_lane((numbers, numbers, numbers), (numbers, numbers), slice(0, 9), 0, 16, 1)
    limits = GraphLimits(max_reqs=8, max_tokens=16, max_seq_len=4096)
    static = GraphBuffers(limits, 16, "cpu", hidden_slot=99)
    batch = make_batch([(300, 1), (20, 1)], block_size=16).metadata
    fill_batch(
        (static.query_start_loc, static.seq_lens, static.block_table, static.slot_mapping),
        (batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping),
        num_real=2,
        num_actual_tokens=2,
        num_reqs=8,
        num_tokens=8,
        block_size=16,
        seq_len_fill=1,
        hidden_slot=99,
    )
    for padded in (0, 4):
        pages = torch.zeros(21, dtype=torch.int32)
        tensors = batch.block_table, batch.query_start_loc, batch.seq_lens
        list_pages(pages, *tensors, block_size=16, most_pages=19, padded_queries=padded)


def main(capability: int, *, every_choice: bool) -> None:
    triton.runtime.driver.set_active(Nobody(capability))
    JITFunction.__getitem__ = compile_instead
    fp8 = capability >= 89
    every_option = {"scale": 0.2, "sliding_window": 100, "soft_cap": 5.0, "sinks": True}
    compile_step(AttentionShape(16, 4, 128), [(300, 1), (20, 40)])
    compile_step(AttentionShape(16, 2, 64, **every_option), [(300, 6), (20, 6)], drafts="tree", fp8=fp8)
    mimo = AttentionShape(64, 8, 192, v_head_dim=128, sliding_window=129, sinks=True)
    compile_step(mimo, [(300, 1), (20, 40)], fp8=fp8)
    compile_latent_step(DEEPSEEK, [(300, 1)])
    compile_latent_step(DEEPSEEK, [(300, 6), (20, 6)], drafts="tree", fp8=fp8)
    if every_choice:
        for stored in (False, True)[: 1 + fp8]:
            compile_choices(fp8=stored)
    compile_linear(QWEN3_NEXT)
    compile_models()
    compile_steps()
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    x = torch.zeros(8, 4, 64, dtype=BF16)
    unpad_ragged(pad_ragged(x, starts, 5), starts, 8)


if __name__ == "__main__":
    main(int(sys.argv[1]), every_choice="all" in sys.argv[2:])
