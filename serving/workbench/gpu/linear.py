"""Linear attention of prompts in the shape of Qwen3-Next: 16 heads of queries and keys, 32 of values, all of 128.

A layer's convolution and gated delta rule, whose chunks of a prompt follow one another: few long prompts keep fewer
programs busy than many short ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention import AttentionShape, GatedDeltaShape, StatePool, UBatchAttention, make_kv_cache
from serving.workbench.arms.cells import scattered_metadata
from serving.workbench.bench.statistics import bootstrap
from serving.workbench.gpu.bench import Bench
from serving.workbench.gpu.report import Section

_PAGE = 16


@torch.inference_mode()
def prompts(bench: Bench, section: Section) -> None:
    """No goal: a layer's time, per size and number of prompts."""
    shape = GatedDeltaShape(1, 2, 8, 8, 4) if bench.tiny else GatedDeltaShape(16, 32, 128, 128, 4)
    batches = [(2, 20)] if bench.tiny else [(1, 4096), (8, 512), (1, 16384), (16, 1024)]
    section.shape = {**vars(shape), "prompts": batches, "dtype": str(bench.dtype)}
    for number, length in batches:
        label = f"{number} of {length} tokens"
        bench.check_time(label)
        found = bench.interleave({"layer": bench.kernel(_layer(bench, shape, number, length))}, label)
        section.arms_ms[label] = found
        section.add(f"{label}: time", bootstrap(found["layer"]), "ms")


def _layer(bench: Bench, shape: GatedDeltaShape, number: int, length: int) -> Callable[[], Tensor]:
    tokens, device = number * length, bench.device
    full = AttentionShape(2, 1, 16)  # of a layer with attention, which plans and does not run
    cache = make_kv_cache(full.cache_spec(1, _PAGE, bench.dtype), number * -(-length // _PAGE), device)
    states = StatePool(shape, 1, number, bench.dtype, device)
    metadata = replace(scattered_metadata(number, length, length, _PAGE, device), state_slots=tuple(range(number)))
    plan: Any = UBatchAttention(full, cache, "torch", states=states).plan(metadata)
    qkv, conv = bench.randn(tokens, shape.conv_dim), bench.randn(shape.conv_kernel, shape.conv_dim).float()
    decay, beta = torch.rand(2, tokens, shape.num_v_heads, device=device)
    g = -decay
    return lambda: plan.linear.forward(qkv, g, beta, conv, 0)
