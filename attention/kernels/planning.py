"""Computations done once per step, on the device: nothing is copied from the host, and the host does not wait.

    tiles           the request and the first query of each tile of `prefill_attention`. Request r's tiles start at
                    query_start_loc[r] // queries_per_tile + r. That always leaves enough room for the tiles of the
                    requests before r, so each request finds its place on its own. Unused entries are -1
    mask offsets    where each request's part of a tree mask starts: the sum of D * length over the requests before it

The kernels run for every request, also in a graph, where each step has another batch.
"""

import triton.language as tl
from torch import Tensor

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
