"""Batches for attention tests: random queries, keys and values over a paged cache in scattered blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention import AttentionShape, BlockAllocator, CommonAttentionMetadata, KVCacheSpec, PagedKVCache


@dataclass(frozen=True)
class Batch:
    """A step's inputs, and the cache as the steps before it left it."""

    shape: AttentionShape
    metadata: CommonAttentionMetadata
    q: Tensor
    k: Tensor
    v: Tensor
    spec: KVCacheSpec
    num_blocks: int
    past: tuple[tuple[int, Tensor, Tensor], ...]
    """(slot, key, value) of every token already in the cache"""

    def new_cache(self) -> PagedKVCache:
        """A cache that holds the requests' prefixes in every layer."""
        cache = PagedKVCache(self.spec, self.num_blocks)
        for layer in range(self.spec.num_layers):
            for slot, key, value in self.past:
                block, offset = divmod(slot, self.spec.block_size)
                cache.keys(layer)[block, offset] = key
                cache.values(layer)[block, offset] = value
        return cache


def make_batch(
    requests: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int, int] = (4, 2, 8),
    block_size: int = 4,
    num_layers: int = 1,
    padding: int = 0,
    seed: int = 0,
) -> Batch:
    """A batch of requests given as (tokens in the cache, new tokens).

    Args:
        requests: one pair each; (0, 0) is a padding request.
        heads: query heads, key/value heads, head dimension.
        block_size: tokens per block.
        num_layers: layers of the cache.
        padding: rows at the end that belong to no request.
        seed: of everything random.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, head_dim = heads
    spec = KVCacheSpec(num_layers, num_kv_heads, head_dim, block_size)
    needed = [spec.blocks_for(prefix + new) for prefix, new in requests]
    num_blocks = sum(needed) + 3
    free = BlockAllocator(num_blocks).allocate(num_blocks)
    rng.shuffle(free)
    widest = max(needed, default=0) + 1
    table = torch.full((len(requests), widest), -1, dtype=torch.int32)  # poison: -1 must never be read
    slots: list[int] = []
    past: list[tuple[int, Tensor, Tensor]] = []
    for row, (prefix, new) in enumerate(requests):
        blocks = [free.pop() for _ in range(needed[row])]
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        places = [blocks[i // block_size] * block_size + i % block_size for i in range(prefix + new)]
        for slot in places[:prefix]:
            key, value = torch.randn(2, num_kv_heads, head_dim, generator=generator)
            past.append((slot, key, value))
        slots += places[prefix:]
    slots += [-1] * padding
    metadata = CommonAttentionMetadata.build(
        [new for _, new in requests],
        [prefix + new for prefix, new in requests],
        table,
        torch.tensor(slots, dtype=torch.int64),
    )
    rows = len(slots)
    # As a model makes them: strided views of one fused projection.
    fused = torch.randn(rows, num_heads + 2 * num_kv_heads, head_dim, generator=generator)
    q, k, v = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return Batch(AttentionShape(*heads), metadata, q, k, v, spec, num_blocks, tuple(past))
