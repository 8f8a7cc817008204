"""The launches of the MoE layer that are compiled for a GPU that need not be there; for `kernels_sm90.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton_compiler import Label, Launches

from moe.kernels.align import align_pairs, tile_batches
from moe.kernels.copy import copy_on_sms
from moe.kernels.expert_map import map_and_count
from moe.kernels.fp8_linear import LinearTile, _launch, linear_tiles
from moe.kernels.gemm_configs import GemmConfig, gemm_configs
from moe.kernels.grouped_gemm import Rows, Weights, project_down, project_up
from moe.kernels.quantize import quantize_rows
from moe.kernels.reduce import sum_choices
from moe.kernels.signals import copy_signalled, make_signals, project_down_signalling

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
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
