"""The launches of attention, routing, models and the MoE layer that are compiled for a GPU that need not be there.

For `kernels_sm90.py`, with the sizes of published models; and of options that no model there has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from attention_batches import make_batch, make_mla_batch
from torch import Tensor
from triton_compiler import Label, Launches

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
from attention.linear import triton_plan as plans
from attention.linear.kernels import tuning as scans
from attention.linear.plan import LinearPlan
from attention.linear.triton_plan import LinearRecords, TritonLinearPlan
from model_runner.kernels.activation import sigmoid_mul, silu_mul
from model_runner.kernels.norm import add_rms_norm, rms_norm
from model_runner.kernels.place import place_lane
from model_runner.kernels.resolve import resolve_tokens, store_tokens
from model_runner.kernels.rope import rotate_heads
from moe.kernels.align import align_pairs, tile_batches
from moe.kernels.copy import copy_on_sms
from moe.kernels.expert_map import map_and_count
from moe.kernels.fp8_linear import LinearTile, _launch, linear_tiles
from moe.kernels.gemm_configs import GemmConfig, gemm_configs
from moe.kernels.grouped_gemm import Rows, Weights, project_down, project_up
from moe.kernels.quantize import quantize_rows
from moe.kernels.reduce import sum_choices
from moe.kernels.router import route_topk
from moe.kernels.signals import copy_signalled, make_signals, project_down_signalling
from ubatch import ForwardMode

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SHAPES = {
    "Qwen3-30B-A3B": AttentionShape(32, 4, 128),
    "Qwen3-Next": AttentionShape(16, 2, 256),
    "gpt-oss": AttentionShape(64, 8, 64, sinks=True, sliding_window=128),
    "GLM-4.5": AttentionShape(96, 8, 128),
}
DEEPSEEK = MLAShape(128, 512, 128, 64, 128)
LATENT_HEADS = (128, 16)
"""DeepSeek's heads on a rank: all of them, with data-parallel attention, and an eighth."""
MOST_QUERIES = (1, 4)
"""Queries of a request that decodes: its token, or drafts as well."""
QWEN3_NEXT = GatedDeltaShape(16, 32, 128, 128, 4)
LINEAR_PROMPTS = ((BF16, 64, 100), (BF16, 32, 25), (torch.float32, 16, 25), (torch.float16, 16, 25))
"""Activations; tokens of a chunk, on a Hopper and on a GPU with less shared memory; and of a prompt."""
NAMES = {BF16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}


def replaced(module: ModuleType, function: str, result: object) -> AbstractContextManager[Any]:
    """A module's `function` returns this."""
    return mock.patch.object(module, function, return_value=result)


def chosen(function: str, choice: object) -> AbstractContextManager[Any]:
    """Tuning, whose `function` has but one choice."""
    return replaced(tuning, function, [choice])


def compile_step(shape: AttentionShape, requests: list[tuple[int, int]], **options: Any) -> None:
    batch = make_batch(requests, shape=shape, block_size=16, padding=1, **options)
    cache = PagedKVCache(replace(batch.spec, dtype=BF16), batch.num_blocks)
    plan = TritonAttentionBackend(shape, cache).plan(batch.metadata)
    plan.forward(batch.q.bfloat16(), batch.k.bfloat16(), batch.v.bfloat16(), 0, batch.sinks)


def compile_latent_step(shape: MLAShape, requests: list[tuple[int, int]], **options: Any) -> None:
    batch = make_mla_batch(requests, shape=shape, block_size=64, padding=1, **options).to(BF16)
    cache = MLAKVCache(batch.spec, batch.num_blocks)
    TritonMLABackend(shape, cache).plan(batch.metadata).forward(batch.inputs, 0)


def compile_attention(launches: Launches) -> None:
    """Every tile that tuning may choose for the models' decodes and prompts, over both kinds of cache."""
    for model, shape in SHAPES.items():
        for fp8 in (False, True):
            stored = "fp8" if fp8 else "bf16"
            for queries in MOST_QUERIES:
                decodes = tuning.decode_choices(shape, queries, BF16, fp8=fp8)
                for place, choice in enumerate(_tiles(decodes)):
                    tile = f"{choice.keys}/{choice.num_warps}/{choice.num_stages}"
                    label = Label("attention", model, f"decode {queries} over {stored}", tile, default=not place)
                    with launches.named(label), chosen("decode_choices", choice):
                        compile_step(shape, [(400, queries)], fp8=fp8, drafts="chain" if queries > 1 else None)
            for place, size in enumerate(tuning.prefill_choices(shape, BF16)):
                tile = f"{size.rows}/{size.keys}/{size.num_warps}/{size.num_stages}"
                label = Label("attention", model, f"prefill over {stored}", tile, default=not place)
                with launches.named(label), chosen("prefill_choices", size):
                    compile_step(shape, [(20, 40)], fp8=fp8)
    _compile_options(launches)


def _compile_options(launches: Launches) -> None:
    """The default tiles with what the models above do not have: few keys, a tree, a cap, values of another size."""
    every_option = {"scale": 0.2, "sliding_window": 100, "soft_cap": 5.0, "sinks": True}
    mimo = AttentionShape(64, 8, 192, v_head_dim=128, sliding_window=129, sinks=True)
    for model, shape in SHAPES.items():
        with launches.named(Label("attention", model, "few keys")):
            compile_step(shape, [(100, 1)])
    with launches.named(Label("attention", "options", "tree over fp8")):
        compile_step(AttentionShape(16, 2, 64, **every_option), [(300, 6), (20, 6)], drafts="tree", fp8=True)
    with launches.named(Label("attention", "MiMo-V2", "decode and prefill over fp8")):
        compile_step(mimo, [(300, 1), (20, 40)], fp8=True)


def compile_latents(launches: Launches) -> None:
    """The same for multi-head latent attention."""
    for heads in LATENT_HEADS:
        shape, model = replace(DEEPSEEK, num_heads=heads), "DeepSeek-V3"
        for fp8 in (False, True):
            stored = "fp8" if fp8 else "bf16"
            for queries in MOST_QUERIES:
                choices = tuning.latent_choices(shape, queries, BF16, fp8=fp8)
                for place, choice in enumerate(_tiles(choices)):
                    tile = f"{choice.rows}/{choice.keys}/{choice.num_warps}/{choice.num_stages}"
                    case = f"{heads} heads, {queries} over {stored}"
                    with (
                        launches.named(Label("latents", model, case, tile, default=not place)),
                        chosen("latent_choices", choice),
                    ):
                        compile_latent_step(shape, [(400, queries)], fp8=fp8, drafts="chain" if queries > 1 else None)
        with launches.named(Label("latents", "DeepSeek-V3", f"{heads} heads, few keys")):
            compile_latent_step(shape, [(100, 1)])
    with launches.named(Label("latents", "options", "tree over fp8")):
        compile_latent_step(replace(DEEPSEEK, num_heads=16), [(300, 6), (20, 6)], drafts="tree", fp8=True)


def _tiles(choices: Iterable[Any]) -> list[Any]:
    """Of choices that differ in how keys are split only, the first."""
    first: dict[Any, Any] = {}
    for choice in choices:
        first.setdefault(replace(choice, waves=0), choice)
    return list(first.values())


def compile_linear(launches: Launches) -> None:
    """Linear attention of prompts with every tile, and of a verify step behind another one, as in a graph."""
    model, shape = "Qwen3-Next", QWEN3_NEXT
    conv, heads = torch.zeros(shape.conv_kernel, shape.conv_dim), torch.zeros(shape.num_v_heads)

    def run(plan: LinearPlan, tokens: int, dtype: torch.dtype = BF16) -> None:
        sizes = shape.conv_dim, shape.value_size, shape.num_v_heads, shape.num_v_heads
        qkv, _, b, a = torch.zeros(tokens, sum(sizes), dtype=dtype).split(sizes, dim=-1)
        plan.forward(qkv, *plan.gates(a, b, heads, heads), conv, 0)

    def batch(lens: list[int], mode: ForwardMode) -> CommonAttentionMetadata:
        table, slots = torch.zeros(len(lens), 1, dtype=torch.int32), torch.zeros(sum(lens), dtype=torch.int64)
        return CommonAttentionMetadata.build(lens, lens, table, slots, mode, state_slots=range(len(lens)))

    pools = {dtype: StatePool(shape, 1, 4, dtype, torch.device("cpu"), num_drafts=3) for dtype in NAMES}
    for dtype, chunk, length in LINEAR_PROMPTS:
        for place, choice in enumerate(scans.scan_choices(shape, dtype)):
            tile = f"{choice.columns}/{choice.num_warps}/{choice.num_stages}"
            label = Label("linear", model, f"{NAMES[dtype]} by {chunk}", tile, default=not place)
            with (
                launches.named(label),
                replaced(scans, "scan_choices", (choice,)),
                replaced(plans, "_largest_chunk", chunk),
            ):
                run(TritonLinearPlan(pools[dtype], batch([length, 1, 5], ForwardMode.MIXED)), length + 6, dtype)
    for lens, mode in (([1, 1], ForwardMode.DECODE), ([4, 4], ForwardMode.TARGET_VERIFY)):
        with launches.named(Label("linear", model)):
            run(LinearRecords(pools[BF16], 2).plan_for_graph(batch(lens, mode)), sum(lens))


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


def compile_small_kernels(launches: Launches) -> None:
    """Of models, steps and ragged batches."""
    with launches.named(Label("models", "any")):
        compile_models()
        compile_steps()
        starts = torch.tensor([0, 3, 8], dtype=torch.int32)
        x = torch.zeros(8, 4, 64, dtype=BF16)
        unpad_ragged(pad_ragged(x, starts, 5), starts, 8)


# -- the MoE layer ---------------------------------------------------------------------------------------------------

LOCAL_EXPERTS, TOKENS, CAPACITY = 2, 16, 64
SMS = 132


@dataclass(frozen=True)
class Experts:
    """The routed experts of a model."""

    hidden: int
    intermediate: int
    num: int
    top_k: int
    dtype: torch.dtype = BF16


EXPERTS = {
    "Qwen3-30B-A3B": Experts(2048, 768, 128, 8),
    "DeepSeek-V3": Experts(7168, 2048, 256, 8, FP8),
    "Qwen3-Next": Experts(2048, 512, 512, 10),
    "GLM-4.5": Experts(5120, 1536, 160, 8),
}
"""Not gpt-oss: its experts have biases, which the grouped GEMM has not (`check_takes_biases`)."""
BATCHED = ("Qwen3-30B-A3B", "DeepSeek-V3")
PROJECTIONS = {"output": (7168, 16384), "latents": (2112, 7168)}
"""Columns and inner size of DeepSeek-V3's largest projection, and of one whose last block of columns is smaller."""


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def weights(dtype: torch.dtype, columns: int, depth: int) -> Weights:
    scales = numbers(LOCAL_EXPERTS, columns // 128, depth // 128, dtype=torch.float32) if dtype == FP8 else None
    return Weights(numbers(LOCAL_EXPERTS, columns, depth, dtype=dtype), scales)


def rows_of(count: int, dtype: torch.dtype, depth: int, capacity: int = 0) -> Rows:
    scales = None
    if dtype == FP8:
        scales = numbers(count, depth // 128, dtype=torch.float32)
        scales = scales.view(LOCAL_EXPERTS, capacity, -1) if capacity else scales
    return Rows(numbers(count, depth, dtype=dtype), scales)


def compile_gemms(launches: Launches, model: str, experts: Experts, rows: int, *, batched: bool = False) -> None:
    """Both GEMMs with every config for tiles of `rows`, dealt and claimed."""
    dtype, top_k = experts.dtype, experts.top_k
    up, down = (
        weights(dtype, 2 * experts.intermediate, experts.hidden),
        weights(dtype, experts.hidden, experts.intermediate),
    )
    result = BF16 if dtype == FP8 else dtype
    if batched:
        with launches.named(Label("routing", model)):
            work: Any = tile_batches(torch.zeros(LOCAL_EXPERTS, dtype=torch.int32), CAPACITY, rows)
        sizes = experts.hidden, experts.intermediate
        x, h = (rows_of(LOCAL_EXPERTS * CAPACITY, dtype, depth, CAPACITY) for depth in sizes)
        h = Rows(h.x, None if h.scales is None else h.scales.flatten(0, 1))
        routed = None
    else:
        with launches.named(Label("routing", model)):
            work = align_pairs(torch.zeros(TOKENS, top_k, dtype=torch.int64), 0, LOCAL_EXPERTS, rows)
        x, h = rows_of(TOKENS, dtype, experts.hidden), rows_of(TOKENS * top_k, dtype, experts.intermediate)
        routed = torch.zeros(TOKENS, top_k)
    name = str(dtype).removeprefix("torch.")
    for gated in (True, False):
        for claimed in (False, True):
            for place, config in enumerate(gemm_configs(rows, dtype, gated=gated, claimed=claimed)):
                case = f"{'up' if gated else 'down'} {name} {rows} rows{' batched' * batched}{' claimed' * claimed}"
                label = Label("experts", model, case, _tile(config), default=not place, per_sm=config.per_sm)
                with launches.named(label):
                    if gated:
                        project_up(x, up, work, top_k, config, SMS)
                    else:
                        project_down(h, down, work, routed, result, config, SMS)


def compile_experts(launches: Launches) -> None:
    """The models' experts, the kernels around them, and the other dtypes in the sizes of the first."""
    for model, experts in EXPERTS.items():
        with launches.named(Label("routing", model)):
            align_pairs(torch.zeros(1000, experts.top_k, dtype=torch.int32), 0, experts.num, 16)
            tile_batches(torch.zeros(experts.num, dtype=torch.int32), CAPACITY, 16)
            quantize_rows(numbers(4, experts.hidden, dtype=BF16))
            chosen = torch.zeros(4, experts.top_k, dtype=torch.int64)
            sum_choices(numbers(4, experts.top_k, experts.hidden, dtype=BF16), chosen, 0, 4)
            table, turns = torch.zeros(64, experts.num + 1, dtype=torch.int32), torch.ones(1, dtype=torch.int64)
            map_and_count(chosen, experts.num, (table, turns), torch.zeros(experts.num, dtype=torch.int64))
        for rows in (16, 32, 64, 128):
            compile_gemms(launches, model, experts, rows)
            if model in BATCHED:
                compile_gemms(launches, model, experts, rows, batched=True)
    for dtype in (torch.float16, torch.float32):
        model = "Qwen3-30B-A3B"
        compile_gemms(launches, model, replace(EXPERTS[model], dtype=dtype), 16)


def compile_signals(launches: Launches) -> None:
    """The projection that signals, the copy that waits, in order or to other places, and the sum of what it brought."""
    model, capacity = "Qwen3-30B-A3B", 200
    experts, counts = EXPERTS[model], torch.zeros(LOCAL_EXPERTS, dtype=torch.int32)
    signals = make_signals(LOCAL_EXPERTS, capacity, experts.hidden, "cpu")
    with launches.named(Label("signals", model)):
        for dtype in (BF16, torch.float16, torch.float32):
            x = numbers(LOCAL_EXPERTS, capacity, experts.intermediate, dtype=dtype)
            w2 = numbers(LOCAL_EXPERTS, experts.hidden, experts.intermediate, dtype=dtype)
            y = project_down_signalling(x, w2, counts, signals, 116)
            for places in (None, torch.zeros(LOCAL_EXPERTS * capacity, dtype=torch.int32)):
                copy_signalled(y, counts, signals, torch.empty_like(y), 16, places)
        rows = numbers(4, experts.top_k, experts.hidden, dtype=BF16)
        ids, routed = torch.zeros(4, experts.top_k, dtype=torch.int64), torch.zeros(4, experts.top_k)
        sum_choices(rows, ids, 0, LOCAL_EXPERTS, routed, signals.alarm.gave_up)
        copy_on_sms(*torch.empty(2, 1 << 20, dtype=torch.uint8), 16)


def compile_projections(launches: Launches) -> None:
    """The linear layer in fp8 with every tile, in bfloat16; and with sums for a bias."""
    for name, (columns, depth) in PROJECTIONS.items():
        weight = numbers(columns, depth, dtype=FP8)
        scales = numbers(-(-columns // 128), depth // 128, dtype=torch.float32)
        for rows, tile, label in _projected(name):
            x, x_scales = numbers(rows, depth, dtype=FP8), numbers(rows, depth // 128, dtype=torch.float32)
            with launches.named(label):
                _launch(x, x_scales, weight, scales, BF16, tile)
                if rows == 16 and label.default:
                    _launch(x, x_scales, weight, scales, torch.float32, tile)


def _projected(name: str) -> Iterator[tuple[int, LinearTile, Label]]:
    for rows in (16, 32, 64, 128):
        for place, tile in enumerate(linear_tiles(rows)):
            text = f"{tile.rows}/{tile.columns}/{tile.num_warps}/{tile.num_stages}{' swap' * tile.swap}"
            yield rows, tile, Label("projections", "DeepSeek-V3", f"{name} {rows} rows", text, default=not place)


def _tile(config: GemmConfig) -> str:
    numbers = (config.columns, config.depth, config.num_warps, config.num_stages)
    return "/".join(map(str, numbers)) + f" x{config.per_sm}" + " swap" * config.swap
