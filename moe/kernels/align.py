"""Assigns rows and tiles to experts, on the device, with launches of a fixed size.

    pair        (token, choice), number token * k + choice
    row         a pair's place, sorted by expert, then by pair number; pairs of other ranks' experts have no row
    tile        up to ROWS rows of one expert: (expert, first row, one past its last row)

    count       chunk of pairs -> number of pairs for each expert; few pairs are counted by every program of `place`
    place       chunk of pairs -> each pair's row, from the counts of the chunks before it; and the tiles

The kernels use no sort and no atomics, so rows are in the same order in every run. Only the device knows the number of
tiles; grids and buffers are sized for the maximum, so one captured graph serves every routing. In the low-latency
layout the rows are in place already, and only tiles are needed.

Source: the block alignment of vLLM's and SGLang's fused MoE, here without padding rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ubatch.kernels.triton_jit import INTERPRETED, cdiv, jit, power_of_2

_MAX_CHUNKS = 128
_CHUNK = 32 if INTERPRETED else 256  # fewest pairs of a chunk; small in tests, so that they have several chunks
_FEW_PAIRS = 64 if INTERPRETED else 2048  # most that every program counts: less time than a launch
_ONE_HOT = 16384  # elements of [pairs, experts] that one program holds at once
_MAX_PROGRAMS = 32  # most programs that write tiles of the low-latency layout


@dataclass(frozen=True)
class Tiles:
    """The work of a grouped GEMM.

    Attributes:
        table: `[T, 3]` int32: each tile's expert, first row, and one past its last row. Entries behind the last tile
            are undefined.
        counters: `[3]` int32: the number of tiles; tiles claimed by the up projection; tiles claimed by the down
            projection. The claims are 0 between launches.
    """

    table: Tensor
    counters: Tensor
    rows: int

    @property
    def most(self) -> int:
        """`T`: the largest possible number of tiles."""
        return self.table.shape[0]


@dataclass(frozen=True)
class Alignment:
    """The rows and tiles of one call's pairs.

    Attributes:
        pair_of_row: `[N * k]` int32, the pair of each row; undefined behind the last row.
        tiles: the tiles of the rows.
    """

    pair_of_row: Tensor
    tiles: Tiles


def some_rows(tiles: Tiles, most: int) -> Tensor:
    """Up to about `most` of the rows that the tiles cover, int64, evenly spread. Reads the tiles on the host."""
    spans = tiles.table[: int(tiles.counters[0])].tolist()
    rows = torch.cat([torch.arange(0), *(torch.arange(first, last) for _, first, last in spans)])
    return rows[:: len(rows) // most | 1].to(tiles.table.device)  # an odd step meets every place in a tile


@jit()
def _one_hot(ids: tl.tensor, first_expert: tl.tensor, inside: tl.tensor, E: tl.constexpr, BINS: tl.constexpr) -> Any:
    """`[pairs, BINS]` int32: 1 at a pair's local expert, all 0 if it has none."""
    local = ids - first_expert
    is_local = inside & (local >= 0) & (local < E)
    bins = tl.arange(0, BINS)
    return ((local[:, None] == bins[None, :]) & is_local[:, None]).to(tl.int32)


@jit()
def _write_tiles(
    table: tl.tensor,
    counters: tl.tensor,
    starts: tl.tensor,
    totals: tl.tensor,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Write the tiles of experts whose rows begin at `starts` `[BINS]`; programs of the first axis share the work."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    experts = tl.arange(0, BINS)
    tiles = (totals + ROWS - 1) // ROWS
    behind = tl.cumsum(tiles, 0)
    for nth in range(program, tl.max(tiles, 0), programs):
        exists = nth < tiles
        row = starts + nth * ROWS
        place = table + (behind - tiles + nth) * 3
        tl.store(place, experts, mask=exists)
        tl.store(place + 1, row, mask=exists)
        tl.store(place + 2, tl.minimum(row + ROWS, starts + totals), mask=exists)
    if program == 0:
        tl.store(counters, tl.sum(tiles, 0))
        tl.store(counters + 1, 0)
        tl.store(counters + 2, 0)


@jit("ids", "num_pairs", "first_expert", "chunk")
def _count_kernel(
    counts: tl.tensor,
    ids: tl.tensor,
    num_pairs: tl.tensor,
    first_expert: tl.tensor,
    chunk: tl.tensor,
    E: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    begin = program * chunk
    found = tl.zeros([BINS], tl.int32)
    for start in range(begin, tl.minimum(begin + chunk, num_pairs), BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        inside = pairs < num_pairs
        one_hot = _one_hot(tl.load(ids + pairs, mask=inside, other=-1), first_expert, inside, E, BINS)
        found += tl.sum(one_hot, 0)
    tl.store(counts + program * BINS + tl.arange(0, BINS), found)


@jit("ids", "num_pairs", "first_expert", "chunk")
def _place_kernel(
    pair_of_row: tl.tensor,
    table: tl.tensor,
    counters: tl.tensor,
    counts: tl.tensor,
    ids: tl.tensor,
    num_pairs: tl.tensor,
    first_expert: tl.tensor,
    chunk: tl.tensor,
    E: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    COUNTED: tl.constexpr,
) -> None:
    program, programs = tl.program_id(0), tl.num_programs(0)
    bins = tl.arange(0, BINS)
    totals, before = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
    if COUNTED:
        for start in range(0, programs, BLOCK_C):
            chunks = start + tl.arange(0, BLOCK_C)
            found = tl.load(counts + chunks[:, None] * BINS + bins[None, :], mask=(chunks < programs)[:, None], other=0)
            totals += tl.sum(found, 0)
            before += tl.sum(tl.where((chunks < program)[:, None], found, 0), 0)
    else:
        for start in range(0, num_pairs, BLOCK):
            pairs = start + tl.arange(0, BLOCK)
            inside = pairs < num_pairs
            one_hot = _one_hot(tl.load(ids + pairs, mask=inside, other=-1), first_expert, inside, E, BINS)
            found = tl.sum(one_hot, 0)
            totals += found
            before += tl.where(start < program * chunk, found, 0)  # a chunk is a number of blocks
    starts = tl.cumsum(totals, 0) - totals
    _write_tiles(table, counters, starts, totals, ROWS, BINS)

    free = starts + before
    begin = program * chunk
    for start in range(begin, tl.minimum(begin + chunk, num_pairs), BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        inside = pairs < num_pairs
        one_hot = _one_hot(tl.load(ids + pairs, mask=inside, other=-1), first_expert, inside, E, BINS)
        row = tl.sum((tl.cumsum(one_hot, 0) - one_hot + free[None, :]) * one_hot, 1)
        tl.store(pair_of_row + row, pairs, mask=tl.sum(one_hot, 1) != 0)
        free += tl.sum(one_hot, 0)


@jit("rows_per_expert", "capacity")
def _tile_batches_kernel(
    table: tl.tensor,
    counters: tl.tensor,
    rows_per_expert: tl.tensor,
    capacity: tl.tensor,
    E: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    experts = tl.arange(0, BINS)
    totals = tl.load(rows_per_expert + experts, mask=experts < E, other=0)
    totals = tl.minimum(tl.maximum(totals, 0), capacity)
    _write_tiles(table, counters, experts * capacity, totals, ROWS, BINS)


def align_pairs(topk_ids: Tensor, first_expert: int, num_experts: int, rows_per_tile: int) -> Alignment:
    """Give every pair of a local expert its row, and cut the rows into tiles.

    Args:
        topk_ids: `[N, k]` int32 or int64, global ids, N and k at least 1. Pairs whose expert is not local get no row.
        first_expert: global id of the first local expert.
        rows_per_tile: most rows of a tile; a power of two.
    """
    ids = topk_ids.contiguous().view(-1)  # contiguous() first: view(-1) of a single column would be strided
    num_pairs = ids.shape[0]
    bins = power_of_2(num_experts)
    block = max(min(_ONE_HOT // bins, _CHUNK), 1)
    chunk = cdiv(max(_CHUNK, cdiv(num_pairs, _MAX_CHUNKS)), block) * block
    chunks = cdiv(num_pairs, chunk)
    device = ids.device
    pair_of_row = torch.empty(num_pairs, dtype=torch.int32, device=device)
    most_tiles = num_pairs // rows_per_tile + min(num_experts, num_pairs)
    tiles = Tiles(
        torch.empty(most_tiles, 3, dtype=torch.int32, device=device),
        torch.empty(3, dtype=torch.int32, device=device),
        rows_per_tile,
    )
    counts = None
    if num_pairs > _FEW_PAIRS:
        counts = torch.empty(chunks, bins, dtype=torch.int32, device=device)
        _count_kernel[(chunks,)](
            counts, ids, num_pairs, first_expert, chunk, E=num_experts, BINS=bins, BLOCK=block, num_warps=8
        )
    _place_kernel[(chunks,)](
        *(pair_of_row, tiles.table, tiles.counters, counts),
        *(ids, num_pairs, first_expert, chunk),
        E=num_experts,
        BINS=bins,
        BLOCK=block,
        BLOCK_C=max(min(_ONE_HOT // 2 // bins, power_of_2(chunks)), 1),
        ROWS=rows_per_tile,
        COUNTED=counts is not None,
        num_warps=8,
    )
    return Alignment(pair_of_row, tiles)


def tile_batches(rows_per_expert: Tensor, capacity: int, rows_per_tile: int) -> Tiles:
    """The tiles of the low-latency layout, where expert `e` has the rows from `e * capacity` on.

    Args:
        rows_per_expert: `[E]` int32, each at most `capacity`.
        capacity: rows that each expert has room for, at least 1.
        rows_per_tile: most rows of a tile; a power of two.
    """
    num_experts, device = rows_per_expert.shape[0], rows_per_expert.device
    per_expert = cdiv(capacity, rows_per_tile)
    tiles = Tiles(
        torch.empty(num_experts * per_expert, 3, dtype=torch.int32, device=device),
        torch.empty(3, dtype=torch.int32, device=device),
        rows_per_tile,
    )
    _tile_batches_kernel[(min(per_expert, _MAX_PROGRAMS),)](
        tiles.table,
        tiles.counters,
        rows_per_expert.contiguous(),
        capacity,
        E=num_experts,
        BINS=power_of_2(num_experts),
        ROWS=rows_per_tile,
    )
    return tiles


def reference_align_pairs(
    topk_ids: Tensor, first_expert: int, num_experts: int, rows_per_tile: int
) -> tuple[list[int], list[tuple[int, int, int]]]:
    """The results of `align_pairs`, computed on the host: the pairs of the rows, and the tiles."""
    pairs: list[int] = []
    tiles: list[tuple[int, int, int]] = []
    for expert in range(num_experts):
        mine = (topk_ids.flatten() == first_expert + expert).nonzero().flatten().tolist()
        stop = len(pairs) + len(mine)
        tiles += [(expert, row, min(row + rows_per_tile, stop)) for row in range(len(pairs), stop, rows_per_tile)]
        pairs += mine
    return pairs, tiles
