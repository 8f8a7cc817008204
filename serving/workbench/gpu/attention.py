"""Paged decode attention, and linear attention of prompts.

decode    in the shape of Qwen3-30B-A3B: 32 query heads share 4 key/value heads of 128. Every request has one query and
          thousands of tokens in the cache, in scattered pages. Keys and values are read once and used for eight heads,
          so memory bounds the kernel: the bytes of keys and values per second are compared with the bandwidth of a copy
          on this device.
prompts   in the shape of Qwen3-Next: 16 heads of queries and keys, 32 of values, all of 128. A layer's convolution and
          gated delta rule, whose chunks of a prompt follow one another: few long prompts keep fewer programs busy than
          many short ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention import AttentionShape, GatedDeltaShape, StatePool, UBatchAttention, make_attention_backend, make_kv_cache
from serving.workbench.arms.cells import scattered_metadata
from serving.workbench.bench.statistics import bootstrap, paired
from serving.workbench.gpu.bench import Bench
from serving.workbench.gpu.report import Arms, Section, in_a_line

_OURS = "triton"
_PEERS = ("flashinfer", "trtllm_mha")
_PAGE = 16


def decode(bench: Bench, section: Section) -> None:
    """Goal: at least 0.9 of the copy bandwidth."""
    shape, context = (AttentionShape(2, 1, 16), 20) if bench.tiny else (AttentionShape(32, 4, 128), 4096)
    batches = [2] if bench.tiny else [64, 128, 256]
    section.shape = {
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "context": context,
        "page": _PAGE,
        "batches": batches,
        "dtype": str(bench.dtype),
    }
    section.add("copy bandwidth", bench.copy_bytes_per_s / 1e9, "GB/s")
    for batch in batches:
        bench.check_time(f"batch {batch}")
        label = f"batch {batch}"
        measured = section.arms_ms[label] = _measure(bench, section, shape, batch, context)
        num_bytes = 2 * batch * context * shape.num_kv_heads * shape.head_dim * bench.dtype.itemsize
        limit_ms = num_bytes / bench.copy_bytes_per_s * 1e3
        section.add(f"{label}: time", bootstrap(measured[_OURS]), "ms")
        share = bootstrap([limit_ms / each for each in measured[_OURS]])
        section.add(f"{label}: share of the copy bandwidth", share, at_least=0.9)
        for name in measured:
            if name != _OURS:
                section.add(f"{label}: speed against {name}", paired(measured[name], measured[_OURS]))


def _measure(bench: Bench, section: Section, shape: AttentionShape, batch: int, context: int) -> Arms:
    torch.manual_seed(batch)
    metadata = scattered_metadata(batch, 1, context, _PAGE, bench.device)
    blocks = batch * -(-context // _PAGE)
    cache: Any = make_kv_cache(shape.cache_spec(1, _PAGE, bench.dtype), blocks, bench.device)
    for pool in (cache.key_pool, cache.value_pool):
        pool.memory.normal_()
    q = bench.randn(batch, shape.num_heads, shape.head_dim)
    k, v = (bench.randn(batch, shape.num_kv_heads, shape.head_dim) for _ in range(2))

    def layer_step(name: str) -> Callable[[], Tensor]:
        plan: Any = make_attention_backend(name, shape, cache).plan(metadata)
        return lambda: plan.forward(q, k, v, 0)

    ours = layer_step(_OURS)
    expected = ours()
    arms = {_OURS: bench.kernel(ours)}
    for name in _PEERS if bench.device.type == "cuda" else ():
        try:
            peer = layer_step(name)
            torch.testing.assert_close(peer().view_as(expected), expected, atol=2e-2, rtol=2e-2)
            arms[name] = bench.kernel(peer)
        except Exception as error:  # not installed, or does not support this GPU
            section.add(f"batch {batch}: speed against {name}", None, note=in_a_line(error))
    return bench.interleave(arms, f"batch {batch}")


# -- linear attention --------------------------------------------------------------------------------------------------


@torch.inference_mode()
def prompts(bench: Bench, section: Section) -> None:
    """No goal: a layer's time, per size and number of prompts."""
    shape = GatedDeltaShape(1, 2, 8, 8, 4) if bench.tiny else GatedDeltaShape(16, 32, 128, 128, 4)
    batches = [(2, 20)] if bench.tiny else [(1, 4096), (8, 512), (1, 16384), (16, 1024)]
    section.shape = {**vars(shape), "prompts": batches, "dtype": str(bench.dtype)}
    for number, length in batches:
        label = f"{number} of {length} tokens"
        bench.check_time(label)
        arms = {"layer": bench.kernel(_layer(bench, shape, number, length))}
        found = section.arms_ms[label] = bench.interleave(arms, label)
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
