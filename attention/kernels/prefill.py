"""Ragged queries over the cache, prefixes included: one program per tile of queries and key/value head.

Which tile belongs to which request is planned once per step, see `attention.kernels.planning`. The step's own keys and
values are read back from the cache, so a prompt, the next chunk of one and a row of decode are all the same thing.

Source: FlashAttention-2 (Dao, 2023).
"""

import triton.language as tl
from torch import Tensor

from attention.interface import AttentionShape
from attention.kernels.tile import (
    BATCH_ARGUMENTS,
    PagedBatch,
    TileSize,
    attend_keys,
    cache_arguments,
    finish_rows,
    score_constants,
)
from attention.kv_cache import PagedKVCache
from ubatch.kernels.triton_jit import jit, rows_contiguous

__all__ = ["prefill_attention"]


@jit(*BATCH_ARGUMENTS)
def _prefill_kernel(
    out: tl.tensor,
    lse: tl.tensor,
    q: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    tiles: tl.tensor,
    sinks: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_table: tl.tensor,
    table_stride: tl.tensor,
    mask: tl.tensor,
    mask_offsets: tl.tensor,
    draft_positions: tl.tensor,
    score_scale: tl.tensor,
    value_scale: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    stride_head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    FP8: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    place, kv_head = tl.program_id(0), tl.program_id(1)
    request = tl.load(tiles + 2 * place)
    if request < 0:
        return
    first_query = tl.load(tiles + 2 * place + 1)
    start = tl.load(query_start_loc + request)
    num_queries = tl.load(query_start_loc + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    prefix = seq_len - num_queries

    rows = tl.arange(0, BLOCK_M)
    query, head = first_query + rows // GROUP, kv_head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_M // GROUP * GROUP) & (query < num_queries)
    query = tl.where(is_row, query, first_query)
    dims = tl.arange(0, BLOCK_D)
    inside = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = (start + query).to(tl.int64) * q_stride_token + head * q_stride_head
    tile = tl.load(q + q_rows[:, None] + dims[None, :], mask=inside, other=0)
    if UPCAST:
        tile = tile.to(tl.float32)

    query_positions = prefix + query
    mask_rows = query
    drafts = start
    # Causal: no query of the tile sees past the tile's end, nor, in a window, further back than its first one does.
    lowest = prefix + first_query
    last = tl.minimum(seq_len, lowest + BLOCK_M // GROUP)
    if HAS_MASK:
        drafts = draft_positions + start
        mask_rows = mask + tl.load(mask_offsets + request) + query.to(tl.int64) * seq_len
        lowest = prefix  # where the root stands: any draft may
        last = seq_len
        if WINDOW > 0:
            query_positions = tl.load(drafts + query).to(tl.int32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(lowest + 1 - WINDOW, 0)
    total, highest, weight_sum = attend_keys(
        tile,
        keys + kv_head * stride_head,
        values + kv_head * stride_head,
        block_table + request.to(tl.int64) * table_stride,
        first,
        last,
        query_positions,
        mask_rows,
        drafts,
        prefix,
        score_scale,
        stride_block,
        stride_slot,
        HEAD_DIM,
        PAGE,
        WINDOW,
        SOFT_CAP,
        HAS_MASK,
        FP8,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
    )

    token = (start + query).to(tl.int64) * NUM_HEADS + head
    finish_rows(
        out,
        lse,
        sinks,
        total,
        highest,
        weight_sum,
        token,
        head,
        is_row,
        value_scale,
        HEAD_DIM,
        HAS_SINKS,
        WRITE_LSE,
        BLOCK_D,
    )


def prefill_attention(
    q: Tensor,
    out: Tensor,
    shape: AttentionShape,
    cache: PagedKVCache,
    layer: int,
    batch: PagedBatch,
    tiles: Tensor,
    size: TileSize,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """Attend for every query that a tile names; rows of others stay as they are.

    Args:
        q: `[T, num_heads, head_dim]`.
        out: `[T, num_heads, head_dim]`, contiguous; written.
        shape: of the attention.
        cache: read; the step's keys and values are in it.
        layer: which layer's cache.
        batch: of the step.
        tiles: `[tiles, 2]` int32 from `planning.plan_tiles`, for `size.queries(shape)` queries each.
        size: of the tiles.
        sinks: `[num_heads]` logits, one more term in each head's denominator.
        lse: `[T, num_heads]` float32, contiguous; written: the natural logarithm of the denominator, its sink included.
    """
    if not tiles.shape[0]:
        return
    q = rows_contiguous(q)
    _prefill_kernel[tiles.shape[0], shape.num_kv_heads](
        out=out,
        lse=lse,
        q=q,
        q_stride_token=q.stride(0),
        q_stride_head=q.stride(1),
        tiles=tiles,
        sinks=sinks,
        HAS_SINKS=sinks is not None,
        WRITE_LSE=lse is not None,
        **cache_arguments(shape, cache, layer),
        **batch.arguments(),
        **score_constants(shape),
        **size.arguments(),
    )
