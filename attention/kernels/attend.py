"""The kernel of multi-head attention over the paged cache: one program per tile of queries and key/value head.

    split    program (key/value head, request, split): all queries of a request with few, and a part of its keys
    tiled    program (tile, key/value head): some queries of a request, and all keys that they see

`attention.kernels.decode` launches the first kind and reduces the partial results; `prefill_attention` launches the
second, whose tiles are assigned to requests once per step (`plan_tiles`).

What is None is left out when the kernel is compiled: tiles (then keys are split), partial results (then there is one
split), a mask, sinks. `C` are its `KernelConstants`.

Source: FlashAttention-2 (Dao, 2023); Flash-Decoding (Dao et al., 2023).

**Planning.** Done once per step, on the device: nothing is copied from the host, and the host does not wait.

    tiles           the request and the first query of each tile of `prefill_attention`. Request r's tiles start at
                    query_start_loc[r] // queries_per_tile + r. That always leaves enough room for the tiles of the
                    requests before r, so each request finds its place on its own. Unused entries are -1
    mask offsets    where each request's part of a tree mask starts: the sum of D * length over the requests before it

These kernels run for every request, also in a graph, where each step has another batch.
"""

import triton.language as tl
from torch import Tensor

from attention.kernels.tile import BATCH_ARGUMENTS, PagedLayer, TileSize, attend_keys, kernel_constants, store_rows
from ubatch.kernels import rows_contiguous
from ubatch.kernels.triton_jit import jit, power_of_2

_TILES_PER_TURN = 32


@jit("query_start_loc", "min_queries")
def _tiles_kernel(
    tiles: tl.tensor,
    query_start_loc: tl.tensor,
    min_queries: tl.tensor,
    QUERIES_PER_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    start = tl.load(query_start_loc + request)
    num_queries = tl.load(query_start_loc + request + 1) - start
    if num_queries < min_queries:
        return
    place = start // QUERIES_PER_TILE + request
    for turn in range(0, tl.cdiv(num_queries, QUERIES_PER_TILE), BLOCK):
        tile = turn + tl.arange(0, BLOCK)
        first = tile * QUERIES_PER_TILE
        where = tiles + 2 * (place + tile)
        tl.store(where, tl.zeros([BLOCK], tl.int32) + request, mask=first < num_queries)
        tl.store(where + 1, first, mask=first < num_queries)


@jit("seq_lens", "num_drafts")
def _mask_offsets_kernel(offsets: tl.tensor, seq_lens: tl.tensor, num_drafts: tl.tensor, BLOCK: tl.constexpr) -> None:
    request, others = tl.program_id(0), tl.arange(0, BLOCK)
    before = tl.load(seq_lens + others, mask=others < request, other=0)
    tl.store(offsets + request, tl.sum(before.to(tl.int64), 0) * num_drafts)


def num_tiles(num_reqs: int, num_tokens: int, queries_per_tile: int) -> int:
    """Entries of the tile list that are enough for any batch of `num_reqs` requests and `num_tokens` tokens."""
    return num_tokens // queries_per_tile + num_reqs


def plan_tiles(
    tiles: Tensor, query_start_loc: Tensor, num_reqs: int, queries_per_tile: int, min_queries: int = 1
) -> None:
    """Write each tile's request and first query, in place.

    Args:
        tiles: `[num_tiles(...), 2]` int32, written: request (-1 for none), first query within the request.
        query_start_loc: `[num_reqs + 1]` int32 or longer.
        queries_per_tile: most queries of a tile.
        min_queries: at least 1; requests with fewer get no tile.
    """
    tiles.fill_(-1)
    if num_reqs:
        _tiles_kernel[num_reqs,](tiles, query_start_loc, min_queries, queries_per_tile, BLOCK=_TILES_PER_TURN)


def plan_mask_offsets(offsets: Tensor, seq_lens: Tensor, num_reqs: int, num_drafts: int) -> None:
    """Write where each request's part of a flat tree mask starts, in place.

    Args:
        offsets: `[num_reqs]` int64 or longer, written.
        seq_lens: `[num_reqs]` int32 or longer; requests behind the last one that has drafts do not matter.
        num_drafts: drafts of every request.
    """
    if num_reqs:
        _mask_offsets_kernel[num_reqs,](offsets, seq_lens, num_drafts, BLOCK=power_of_2(num_reqs))


@jit(*BATCH_ARGUMENTS, "num_splits")
def _attention_kernel(
    out: tl.tensor,
    sinks: tl.tensor,
    tiles: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    q: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
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
    v_stride_block: tl.tensor,
    v_stride_slot: tl.tensor,
    v_stride_head: tl.tensor,
    num_splits: tl.tensor,
    C: tl.constexpr,
) -> None:
    first_query = 0
    if tiles is not None:
        place, kv_head = tl.program_id(0), tl.program_id(1)
        request = tl.load(tiles + 2 * place)
        if request < 0:
            return
        first_query = tl.load(tiles + 2 * place + 1)
    else:
        kv_head, request = tl.program_id(0), tl.program_id(1)
    start = tl.load(query_start_loc + request)
    num_queries = tl.load(query_start_loc + request + 1) - start
    if tiles is None:  # noqa: SIM102 - Triton evaluates the outer condition when it compiles
        if (num_queries == 0) | (num_queries > C.max_queries):
            return
    seq_len = tl.load(seq_lens + request)
    prefix = seq_len - num_queries

    rows = tl.arange(0, C.size.rows)
    query, head = first_query + rows // C.shape.group_size, kv_head * C.shape.group_size + rows % C.shape.group_size
    is_row = (rows < C.size.rows // C.shape.group_size * C.shape.group_size) & (query < num_queries)
    query = tl.where(is_row, query, first_query)
    dims = tl.arange(0, C.size.dims)
    inside = is_row[:, None] & (dims < C.shape.head_dim)[None, :]
    q_rows = (start + query).to(tl.int64) * q_stride_token + head * q_stride_head
    tile = tl.load(q + q_rows[:, None] + dims[None, :], mask=inside, other=0)
    if C.upcast:
        tile = tile.to(tl.float32)

    query_positions = prefix + query
    mask_rows = None
    drafts = None
    lowest = prefix + first_query
    last = seq_len
    if mask is not None:
        drafts = draft_positions + start
        mask_rows = mask + tl.load(mask_offsets + request) + query.to(tl.int64) * seq_len
        lowest = prefix  # the root's position; no draft has a lower one
        if C.window > 0:
            query_positions = tl.load(drafts + query).to(tl.int32)
    elif tiles is not None:  # causal: no query of the tile sees past the tile's end
        last = tl.minimum(seq_len, lowest + C.size.rows // C.shape.group_size)
    first = 0
    if C.window > 0:  # no query sees further back than the tile's first one
        first = tl.maximum(lowest + 1 - C.window, 0)
    if tiles is None:  # equal parts of whole tiles
        keys_per_split = tl.cdiv(tl.cdiv(seq_len - first, num_splits), C.size.keys) * C.size.keys
        first += tl.program_id(2) * keys_per_split
        last = tl.minimum(first + keys_per_split, seq_len)
    total, highest, weight_sum = attend_keys(
        tile,
        keys + kv_head * stride_head,
        values + kv_head * v_stride_head,
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
        v_stride_block,
        v_stride_slot,
        C,
    )

    store_rows(
        out,
        sinks,
        partial_out,
        partial_lse,
        total,
        highest,
        weight_sum,
        start,
        request,
        query,
        head,
        is_row,
        num_splits,
        value_scale,
        C.shape.num_heads,
        C.max_queries,
        C.shape.value_dim,
        C.value_dims,
    )


def launch_attention(
    grid: tuple[int, int, int],
    q: Tensor,
    out: Tensor,
    where: PagedLayer,
    size: TileSize,
    *,
    tiles: Tensor | None = None,
    partials: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    num_splits: int = 1,
    max_queries: int = 0,
) -> None:
    """Launch programs of either kind; for the other arguments see `prefill_attention` and `decode_attention`.

    Args:
        tiles: the query tiles; None splits keys.
        partials: buffers for the splits' outputs and LSEs, if there are several splits.
        num_splits: splits of a request's keys.
        max_queries: most queries of a request whose keys are split.
    """
    q = rows_contiguous(q)
    spec = where.cache.spec
    _attention_kernel[grid](
        out=out,
        tiles=tiles,
        partial_out=partials[0],
        partial_lse=partials[1],
        q=q,
        q_stride_token=q.stride(0),
        q_stride_head=q.stride(1),
        **where.arguments(),
        num_splits=num_splits,
        C=kernel_constants(where.shape, size, spec.block_size, spec.fp8, max_queries),
        num_warps=size.num_warps,
        num_stages=size.num_stages,
    )


def prefill_attention(q: Tensor, out: Tensor, where: PagedLayer, tiles: Tensor, size: TileSize) -> None:
    """Attend for every query that is in a tile, prefixes included; other queries' rows are not written.

    The step's own keys and values are read back from the cache, so a prompt, the next chunk of one and a decode row are
    treated alike.

    Args:
        q: `[T, num_heads, head_dim]`.
        out: `[T, num_heads, value_dim]`, contiguous; written.
        tiles: `[tiles, 2]` int32 from `plan_tiles`, for `size.queries(shape)` queries each.
    """
    if tiles.shape[0]:
        launch_attention((tiles.shape[0], where.shape.num_kv_heads, 1), q, out, where, size, tiles=tiles)
