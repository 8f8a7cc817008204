"""Attention as slowly and plainly as it can be written: the oracle of every back end."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.kv_cache import PagedKVCache
from attention.metadata import CommonAttentionMetadata

__all__ = ["reference_attention"]


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, layer: int, metadata: CommonAttentionMetadata, cache: PagedKVCache, scale: float
) -> Tensor:
    """Write the keys and values, then attend: one request, one query token and one head at a time.

    Args:
        q: `[T, num_heads, head_dim]`.
        k: `[T, num_kv_heads, head_dim]`.
        v: `[T, num_kv_heads, head_dim]`.
        layer: which layer's cache.
        metadata: the batch.
        cache: written and read.
        scale: factor on the scores.

    Returns:
        `[T, num_heads, head_dim]`; rows of padding are 0.
    """
    block_size = cache.spec.block_size
    keys, values = cache.keys(layer), cache.values(layer)
    for token, slot in enumerate(metadata.slot_mapping.tolist()):
        if slot >= 0:
            keys[slot // block_size, slot % block_size] = k[token]
            values[slot // block_size, slot % block_size] = v[token]
    heads_per_kv_head = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for request in range(metadata.num_reqs):
        start, stop = metadata.query_start_loc[request : request + 2].tolist()
        blocks = metadata.block_table[request].tolist()
        prefix = int(metadata.seq_lens[request]) - (stop - start)
        for token in range(start, stop):
            length = prefix + token - start + 1
            places = [(blocks[i // block_size], i % block_size) for i in range(length)]
            for head in range(q.shape[1]):
                seen = torch.stack([keys[block, offset, head // heads_per_kv_head] for block, offset in places])
                weight = torch.softmax(seen @ q[token, head] * scale, dim=0)
                told = torch.stack([values[block, offset, head // heads_per_kv_head] for block, offset in places])
                out[token, head] = weight @ told
    return out
