"""Attention written as plainly as possible, and slow: tests compare every back end with it.

New tokens are written to the cache first. Then each request's keys and values are read back (dequantised if the cache
is fp8), and one request, one query token and one head at a time attends over the tokens that the query sees:

    causal              its own token and all before it
    tree of drafts      the tokens that its row of the custom mask allows
    sliding window      of those, the ones fewer than `sliding_window` positions back; sibling drafts share a position
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from attention.interface import AttentionShape, MLAInputs, MLAShape
from attention.kv_cache import MLAKVCache, PagedKVCache
from attention.metadata import CommonAttentionMetadata


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    metadata: CommonAttentionMetadata,
    cache: PagedKVCache,
    shape: AttentionShape,
    sinks: Tensor | None = None,
) -> Tensor:
    """Multi-head and grouped-query attention.

    Args:
        q: `[T, num_heads, head_dim]`.
        k: `[T, num_kv_heads, head_dim]`.
        v: `[T, num_kv_heads, value_dim]`.
        metadata: the batch.
        cache: written and read.
        shape: heads, scale, window, soft cap.
        sinks: `[num_heads]`, one more logit in each head's denominator; None for none.

    Returns:
        `[T, num_heads, value_dim]`; rows of padding are 0.
    """
    cache.write(layer, k, v, cache.write_slots(metadata.slot_mapping))
    pools = (cache.key_pool, cache.value_pool)
    key_rows, value_rows = (pool.decode(pool.blocks(layer), layer).flatten(0, 1) for pool in pools)
    out = q.new_zeros(*q.shape[:2], shape.value_dim)
    for request in range(metadata.num_reqs):
        slots = _slots(metadata, request, cache.spec.block_size)
        for row, seen in _visible(metadata, request, shape.sliding_window):
            for head in range(shape.num_heads):
                keys = key_rows[slots, head // shape.group_size]
                values = value_rows[slots, head // shape.group_size]
                scores = keys[seen] @ q[row, head] * shape.softmax_scale
                if shape.soft_cap is not None:
                    scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
                out[row, head] = _softmax(scores, None if sinks is None else sinks[head]) @ values[seen]
    return out


def reference_mla(
    inputs: MLAInputs, layer: int, metadata: CommonAttentionMetadata, cache: MLAKVCache, shape: MLAShape
) -> Tensor:
    """Multi-head latent attention without absorption: every latent in the cache is expanded to keys and values.

    Args:
        inputs: of this layer; queries and keys not rotated yet.
        metadata: the batch.
        cache: written and read.
        shape: sizes and scale.

    Returns:
        `[T, num_heads, v_head_dim]`; rows of padding are 0.
    """
    q_rope, k_rope = inputs.rope.rotate(inputs.q_rope), inputs.rope.rotate(inputs.k_rope)
    cache.write(layer, inputs.latent, k_rope, cache.write_slots(metadata.slot_mapping))
    cached = cache.pool.decode(cache.rows(layer), layer).flatten(0, 1)
    out = inputs.q_nope.new_zeros(*inputs.q_nope.shape[:2], shape.v_head_dim)
    for request in range(metadata.num_reqs):
        rows = cached[_slots(metadata, request, cache.spec.block_size)]
        latents, positions = rows.split([shape.kv_lora_rank, shape.qk_rope_head_dim], dim=-1)
        for head in range(shape.num_heads):
            keys = torch.cat((latents @ inputs.w_uk[head].T, positions), dim=-1)
            values = latents @ inputs.w_uv[head]
            for row, seen in _visible(metadata, request, None):
                query = torch.cat((inputs.q_nope[row, head], q_rope[row, head]))
                scores = keys[seen] @ query * shape.softmax_scale
                out[row, head] = _softmax(scores, None) @ values[seen]
    return out


def _softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Softmax weights of the scores, which may be empty; a sink only adds to the denominator."""
    terms = scores if sink is None else torch.cat((scores, sink.reshape(1).to(scores.dtype)))
    return torch.softmax(terms, dim=0)[: len(scores)]


def _slots(metadata: CommonAttentionMetadata, request: int, block_size: int) -> Tensor:
    """The slots of the request's tokens in the cache, in order."""
    blocks = metadata.block_table[request].tolist()
    length = int(metadata.seq_lens[request])
    slots = [blocks[token // block_size] * block_size + token % block_size for token in range(length)]
    return torch.tensor(slots, dtype=torch.int64, device=metadata.slot_mapping.device)


def _visible(metadata: CommonAttentionMetadata, request: int, window: int | None) -> Iterator[tuple[int, list[int]]]:
    """For each of the request's queries, its row in the batch and which of the request's tokens it sees."""
    start, stop = metadata.query_start_loc[request : request + 2].tolist()
    length = int(metadata.seq_lens[request])
    prefix = length - (stop - start)
    verify = metadata.spec_verify
    mask = None
    positions = list(range(length))
    if verify is not None and request < verify.num_reqs:
        mask = verify.mask_of(request)
        positions[prefix:] = verify.positions[start:stop].tolist()
    for query in range(stop - start):
        shown = range(prefix + query + 1) if mask is None else mask[query].nonzero().flatten().tolist()
        here = positions[prefix + query]
        yield start + query, [key for key in shown if window is None or positions[key] > here - window]
