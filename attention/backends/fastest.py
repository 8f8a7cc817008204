"""Which attention back end is the fastest here: each runs one layer of a decode or a prefill batch over a small cache.

Making the plan is not timed: a step makes one plan, and all of its layers share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from attention.interface import AttentionBackend, AttentionShape, MLAInputs, RopeTable, Shape
from attention.kv_cache import CacheSpec, KVCache, make_kv_cache
from attention.metadata import CommonAttentionMetadata
from ubatch import ForwardMode
from ubatch.kernels import Chosen, Launches, fastest, measured

_DECODE, _PREFILL = (64, 1024), (4, 512)  # requests, and tokens of each
_PACKAGES = ("flashinfer-python",)


def fastest_attention(
    names: Sequence[str],
    make: Callable[[str, KVCache], AttentionBackend],
    shape: Shape,
    spec: CacheSpec,
    device: torch.device,
    *,
    decode: bool,
) -> Chosen:
    """The fastest of some attention back ends; the first one on a CPU, or if nothing can be timed.

    Args:
        names: names of back ends that can be used with this shape and cache.
        make: makes a back end over a cache.
        decode: time one new token per request; else time whole prompts.

    Raises:
        ConfigError: none of them works here.
    """
    if not measured(device):
        return Chosen(names[0], f"the first that this {device.type} and model can use")
    requests, tokens = _DECODE if decode else _PREFILL
    pages = requests * spec.blocks_for(tokens)
    own_cache = cache(lambda: make_kv_cache(replace(spec, num_layers=1), pages, device))  # only if something is timed

    def launch(name: str) -> Launches:
        kv_cache = own_cache()
        plan = make(name, kv_cache).plan(_metadata(requests, tokens, kv_cache, decode=decode))
        return [partial(plan.forward, *_inputs(shape, kv_cache, requests, tokens, decode=decode))]

    return fastest(
        f"attention {shape} in pages of {spec.block_size}, {spec.dtype}{' stored in fp8' if spec.fp8 else ''}",
        {name: partial(launch, name) for name in names},
        [f"{'a decode' if decode else 'prompts'} of {requests} x {tokens} tokens"],
        device=device,
        packages=_PACKAGES,
    )


def _metadata(requests: int, tokens: int, kv_cache: KVCache, *, decode: bool) -> CommonAttentionMetadata:
    """Metadata of requests of equal length, one after the other in the cache."""
    device, pages = kv_cache.device, kv_cache.spec.blocks_for(tokens)
    table = torch.arange(requests * pages, dtype=torch.int32, device=device).view(requests, pages)
    rows = torch.arange(requests, device=device)[:, None] * pages * kv_cache.spec.block_size
    slots = rows + torch.arange(tokens - 1 if decode else 0, tokens, device=device)
    query_lens = [1 if decode else tokens] * requests
    mode = ForwardMode.DECODE if decode else ForwardMode.PREFILL
    return CommonAttentionMetadata.build(query_lens, [tokens] * requests, table, slots.flatten(), mode)


def _inputs(shape: Shape, kv_cache: KVCache, requests: int, tokens: int, *, decode: bool) -> tuple[object, ...]:
    """Arguments of `AttentionPlan.forward` or `MLAPlan.forward`."""
    device = kv_cache.device
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, dtype=kv_cache.spec.dtype, device=device, generator=generator)

    positions = torch.arange(tokens - 1 if decode else 0, tokens, device=device).repeat(requests)
    rows = positions.shape[0]
    if isinstance(shape, AttentionShape):
        k, v = (draw(rows, shape.num_kv_heads, dim) for dim in (shape.head_dim, shape.value_dim))
        return draw(rows, shape.num_heads, shape.head_dim), k, v, 0, draw(shape.num_heads) if shape.sinks else None
    heads, rank, rope = shape.num_heads, shape.kv_lora_rank, shape.qk_rope_head_dim
    inputs = MLAInputs(
        q_nope=draw(rows, heads, shape.qk_nope_head_dim),
        q_rope=draw(rows, heads, rope),
        latent=draw(rows, rank),
        k_rope=draw(rows, rope),
        w_uk=draw(heads, shape.qk_nope_head_dim, rank) * rank**-0.5,
        w_uv=draw(heads, rank, shape.v_head_dim) * rank**-0.5,
        rope=RopeTable(torch.ones(tokens, rope, device=device), positions),
    )
    return inputs, 0
