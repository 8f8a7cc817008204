"""Batches for attention tests: random inputs over a paged cache in scattered blocks, of every kind a step can be.

Block tables hold -1 past a request's blocks, and the cache holds large stale numbers wherever no token is: whoever
reads what is not the request's gives another result, or an error.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from attention import (
    AttentionShape,
    BlockAllocator,
    CommonAttentionMetadata,
    KVCacheSpec,
    MLACacheSpec,
    MLAInputs,
    MLAKVCache,
    MLAShape,
    PagedKVCache,
    RopeTable,
    SpecVerifyInput,
)
from attention.reference import reference_attention, reference_mla
from ubatch import ForwardMode

STALE = 77.0
Drafts = Literal["chain", "tree"]


def fp8_scales(layer: int) -> tuple[float, float]:
    """Of a layer's keys (or latents) and values in the fp8 caches made here."""
    return 0.05 * (layer + 1), 0.02 * (layer + 1)


@dataclass(frozen=True)
class Batch:
    """A step's inputs, and the cache as the steps before it left it."""

    shape: AttentionShape
    metadata: CommonAttentionMetadata
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    spec: KVCacheSpec
    num_blocks: int
    past_slots: Tensor
    past_k: Tensor
    past_v: Tensor
    """of every token that is in the cache already; the same in all layers"""

    def new_cache(self) -> PagedKVCache:
        """A cache that holds the requests' prefixes in every layer."""
        cache = PagedKVCache(self.spec, self.num_blocks)
        slots = torch.arange(self.num_blocks * self.spec.block_size)
        rows = (self.past_k.shape[1:], self.past_v.shape[1:])
        stale = [torch.full((len(slots), *row), STALE, dtype=self.spec.dtype) for row in rows]
        for layer in range(self.spec.num_layers):
            if self.spec.fp8:
                cache.set_scales(layer, *fp8_scales(layer))
            cache.write(layer, *stale, slots)
            cache.write(layer, self.past_k, self.past_v, self.past_slots)
        return cache

    def expected(self, layer: int = 0, cache: PagedKVCache | None = None) -> Tensor:
        """What the oracle says; `cache` is written."""
        cache = self.new_cache() if cache is None else cache
        return reference_attention(self.q, self.k, self.v, layer, self.metadata, cache, self.shape, self.sinks)

    def to(self, dtype: torch.dtype) -> Batch:
        """The same batch computed in `dtype`; of its numbers, what `dtype` can hold."""
        parts = {name: getattr(self, name).to(dtype) for name in ("q", "k", "v", "past_k", "past_v")}
        sinks = None if self.sinks is None else self.sinks.to(dtype)
        return replace(self, **parts, sinks=sinks, spec=replace(self.spec, dtype=dtype))


@dataclass(frozen=True)
class MLABatch:
    """The same for multi-head latent attention."""

    shape: MLAShape
    metadata: CommonAttentionMetadata
    inputs: MLAInputs
    spec: MLACacheSpec
    num_blocks: int
    past_slots: Tensor
    past_latent: Tensor
    past_k_rope: Tensor
    """rotated"""

    def new_cache(self) -> MLAKVCache:
        """A cache that holds the requests' prefixes in every layer."""
        cache = MLAKVCache(self.spec, self.num_blocks)
        slots = torch.arange(self.num_blocks * self.spec.block_size)
        stale = torch.full((len(slots), self.spec.numbers_per_token), STALE, dtype=self.spec.dtype)
        for layer in range(self.spec.num_layers):
            if self.spec.fp8:
                cache.set_scale(layer, fp8_scales(layer)[0])
            cache.write(layer, *stale.split([self.spec.kv_lora_rank, self.spec.qk_rope_head_dim], dim=1), slots)
            cache.write(layer, self.past_latent, self.past_k_rope, self.past_slots)
        return cache

    def expected(self, layer: int = 0, cache: MLAKVCache | None = None) -> Tensor:
        """What the oracle says; `cache` is written."""
        cache = self.new_cache() if cache is None else cache
        return reference_mla(self.inputs, layer, self.metadata, cache, self.shape)

    def to(self, dtype: torch.dtype) -> MLABatch:
        """The same batch computed in `dtype`; of its numbers, what `dtype` can hold."""
        names = ("q_nope", "q_rope", "latent", "k_rope", "w_uk", "w_uv")
        inputs = replace(self.inputs, **{name: getattr(self.inputs, name).to(dtype) for name in names})
        past = {name: getattr(self, name).to(dtype) for name in ("past_latent", "past_k_rope")}
        return replace(self, **past, inputs=inputs, spec=replace(self.spec, dtype=dtype))


def make_batch(
    requests: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int, int] = (4, 2, 8),
    shape: AttentionShape | None = None,
    block_size: int = 4,
    num_layers: int = 1,
    padding: int = 0,
    fp8: bool = False,
    drafts: Drafts | None = None,
    mode: ForwardMode | None = None,
    seed: int = 0,
) -> Batch:
    """A batch of requests given as (tokens in the cache, new tokens).

    Args:
        requests: one pair each; (0, 0) is a padding request.
        heads: query heads, key/value heads, head dimension; or
        shape: the whole shape.
        block_size: tokens per block.
        num_layers: layers of the cache.
        padding: rows at the end that belong to no request.
        fp8: whether the cache is.
        drafts: a verify batch, whose requests all have as many new tokens; padding requests come last.
        mode: of the batch; by default what the requests look like.
        seed: of everything random.
    """
    shape = AttentionShape(*heads) if shape is None else shape
    spec = shape.cache_spec(num_layers, block_size, torch.float32, fp8=fp8)
    generator = torch.Generator().manual_seed(seed)
    layout = _layout(requests, spec, padding, drafts, mode, seed)
    heads_and_dims = [
        (shape.num_heads, shape.head_dim),
        (shape.num_kv_heads, shape.head_dim),
        (shape.num_kv_heads, shape.value_dim),
    ]
    past_k, past_v = (torch.randn(len(layout.past_slots), *row, generator=generator) for row in heads_and_dims[1:])
    # As a model makes them: strided views of one fused projection.
    rows, sizes = len(layout.metadata.slot_mapping), [number * dim for number, dim in heads_and_dims]
    parts = torch.randn(rows, sum(sizes), generator=generator).split(sizes, dim=1)
    q, k, v = (part.unflatten(1, size) for part, size in zip(parts, heads_and_dims, strict=True))
    sinks = torch.randn(shape.num_heads, generator=generator) if shape.sinks else None
    return Batch(shape, layout.metadata, q, k, v, sinks, spec, layout.num_blocks, layout.past_slots, past_k, past_v)


def make_mla_batch(
    requests: Sequence[tuple[int, int]],
    *,
    shape: MLAShape | None = None,
    block_size: int = 4,
    num_layers: int = 1,
    padding: int = 0,
    fp8: bool = False,
    drafts: Drafts | None = None,
    mode: ForwardMode | None = None,
    interleaved: bool = True,
    seed: int = 0,
) -> MLABatch:
    """As `make_batch`.

    Args:
        requests: (tokens in the cache, new tokens) each.
        shape: by default one for which a `torch` prefill of 3 tokens and more is expanded, a decode absorbed.
        block_size: tokens per block.
        num_layers: layers of the cache.
        padding: rows at the end that belong to no request.
        fp8: whether the cache is.
        drafts: a verify batch.
        mode: of the batch.
        interleaved: how rope pairs numbers.
        seed: of everything random.
    """
    shape = MLAShape(4, 16, 2, 4, 3) if shape is None else shape
    spec = shape.cache_spec(num_layers, block_size, torch.float32, fp8=fp8)
    generator = torch.Generator().manual_seed(seed)
    layout = _layout(requests, spec, padding, drafts, mode, seed)
    rows, rank, rope = len(layout.metadata.slot_mapping), shape.kv_lora_rank, shape.qk_rope_head_dim

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    angles = torch.outer(torch.arange(1024.0), 0.1 ** torch.arange(rope // 2))
    q = draw(rows, shape.num_heads, shape.qk_head_dim)
    w_kv = draw(shape.num_heads, shape.qk_nope_head_dim + shape.v_head_dim, rank) * rank**-0.5
    w_uk, w_uv = w_kv.split([shape.qk_nope_head_dim, shape.v_head_dim], dim=1)
    q_nope, q_rope = q.split([shape.qk_nope_head_dim, rope], dim=-1)
    inputs = MLAInputs(
        q_nope=q_nope,
        q_rope=q_rope,
        latent=draw(rows, rank),
        k_rope=draw(rows, rank + rope)[:, rank:],
        w_uk=w_uk,
        w_uv=w_uv.transpose(1, 2),
        rope=RopeTable(torch.cat((angles.cos(), angles.sin()), dim=-1), layout.positions, interleaved),
    )
    past = len(layout.past_slots)
    return MLABatch(
        shape, layout.metadata, inputs, spec, layout.num_blocks, layout.past_slots, draw(past, rank), draw(past, rope)
    )


@dataclass(frozen=True)
class _Layout:
    """Where everything of a batch is."""

    metadata: CommonAttentionMetadata
    num_blocks: int
    past_slots: Tensor
    positions: Tensor


def _layout(
    requests: Sequence[tuple[int, int]],
    spec: KVCacheSpec | MLACacheSpec,
    padding: int,
    drafts: Drafts | None,
    mode: ForwardMode | None,
    seed: int,
) -> _Layout:
    rng = random.Random(seed)
    block_size = spec.block_size
    needed = [spec.blocks_for(prefix + new) for prefix, new in requests]
    num_blocks = sum(needed) + 3
    free = BlockAllocator(num_blocks).allocate(num_blocks)
    rng.shuffle(free)
    table = torch.full((len(requests), max(needed, default=0) + 1), -1, dtype=torch.int32)
    slots: list[int] = []
    past: list[int] = []
    positions: list[int] = []
    for row, (prefix, new) in enumerate(requests):
        blocks = [free.pop() for _ in range(needed[row])]
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        places = [blocks[i // block_size] * block_size + i % block_size for i in range(prefix + new)]
        past += places[:prefix]
        slots += places[prefix:]
        positions += range(prefix, prefix + new)
    spec_verify = _spec_verify(requests, drafts, rng)
    if spec_verify is not None:
        positions = spec_verify.positions.tolist()
    metadata = CommonAttentionMetadata.build(
        [new for _, new in requests],
        [prefix + new for prefix, new in requests],
        table,
        torch.tensor(slots + [-1] * padding, dtype=torch.int64),
        _mode_of(requests, drafts) if mode is None else mode,
        spec_verify,
    )
    return _Layout(
        metadata,
        num_blocks,
        torch.tensor(past, dtype=torch.int64),
        torch.tensor(positions + [0] * padding, dtype=torch.int64),
    )


def _mode_of(requests: Sequence[tuple[int, int]], drafts: Drafts | None) -> ForwardMode:
    news = [new for _, new in requests if new]
    if not news:
        return ForwardMode.IDLE
    if drafts is not None:
        return ForwardMode.TARGET_VERIFY
    if max(news) == 1:
        return ForwardMode.DECODE
    return ForwardMode.MIXED if min(news) == 1 else ForwardMode.PREFILL


def _spec_verify(
    requests: Sequence[tuple[int, int]], drafts: Drafts | None, rng: random.Random
) -> SpecVerifyInput | None:
    real = [(prefix, new) for prefix, new in requests if new]
    if drafts is None or not real:
        return None
    number = real[0][1]
    masks: list[Tensor] = []
    positions: list[int] = []
    for prefix, _ in real:
        # Draft 0 is the root; every other one hangs on an earlier one, in a chain on the one before it.
        parents = [-1, *(i - 1 if drafts == "chain" else rng.randrange(i) for i in range(1, number))]
        mask = torch.zeros(number, prefix + number, dtype=torch.bool)
        mask[:, :prefix] = True
        depth = [0] * number
        for i, parent in enumerate(parents):
            if parent >= 0:
                mask[i, prefix:] = mask[parent, prefix:]
                depth[i] = depth[parent] + 1
            mask[i, prefix + i] = True
        masks.append(mask.flatten())
        positions += [prefix + d for d in depth]
    none = torch.full((len(real), number), -1, dtype=torch.int64)
    return SpecVerifyInput(
        num_draft_tokens=number,
        prefix_lens=tuple(prefix for prefix, _ in real),
        draft_tokens=torch.arange(len(positions)),
        positions=torch.tensor(positions, dtype=torch.int64),
        custom_mask=torch.cat(masks) if drafts == "tree" else None,
        retrieve_index=torch.arange(len(positions)).view(-1, number),
        retrieve_next_token=none,
        retrieve_next_sibling=none,
    )
