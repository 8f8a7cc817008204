"""Computes one tile of the grouped GEMM: rows by columns, summed over the inner dimension, activated or weighted.

Rows and weights, `[rows, K]` and `[columns, K]`, are both contiguous along K. If `a` or `w` is a descriptor, it is
loaded by the tensor memory accelerator (TMA), else by addresses; in both cases Triton's pipeline keeps the loads of
several iterations in flight. With SWAP the product is transposed: weights by rows.
"""

# mypy: disable-error-code="possibly-undefined"
# Triton evaluates the conditions on constants when it compiles.

from typing import Any

import triton.language as tl

from moe.kernels.quantize import BLOCK, block_scale
from ubatch.kernels.triton_jit import constant, jit, to_fp8

_SCALED = constant(BLOCK)


@jit()
def tile_place(tile: tl.tensor, row_tiles: tl.tensor, COLUMN_TILES: tl.constexpr, GROUP: tl.constexpr) -> Any:
    """Row and column of the n-th tile. GROUP row tiles follow each other for one column tile, then for the next."""
    nth = tile % (GROUP * COLUMN_TILES)
    first = tile // (GROUP * COLUMN_TILES) * GROUP
    size = tl.maximum(tl.minimum(row_tiles - first, GROUP), 1)
    return first + nth % size, nth // size


@jit()
def _load_rows(
    a: tl.tensor,
    a_row: tl.tensor,
    first_row: tl.tensor,
    k: tl.tensor,
    K: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> Any:
    """Load `[BLOCK_M, BLOCK_K]`: the rows from `first_row` on, or the rows that begin at `a_row` `[BLOCK_M]`."""
    if TMA:
        tile = a.load([first_row, k])
    else:
        steps = k + tl.arange(0, BLOCK_K)
        place = a + a_row[:, None] + steps[None, :]
        tile = tl.load(place) if K % BLOCK_K == 0 else tl.load(place, mask=(steps < K)[None, :], other=0)
    return tile


@jit()
def _load_weights(
    w: tl.tensor,
    first: tl.tensor,
    columns_left: tl.tensor,
    k: tl.tensor,
    K: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> Any:
    """Load `[BLOCK_N, BLOCK_K]` from row `first` of `w` `[E * columns, K]` on."""
    if TMA:
        tile = w.load([first, k])
    else:
        rows, steps = tl.arange(0, BLOCK_N), k + tl.arange(0, BLOCK_K)
        place = (first + rows).to(tl.int64)[:, None] * K + steps[None, :]
        tile = tl.load(w + place, mask=(rows < columns_left)[:, None] & (steps < K)[None, :], other=0)
    return tile


@jit()
def _multiply_add(sums: tl.tensor, a: tl.tensor, w: tl.tensor, SWAP: tl.constexpr, UPCAST: tl.constexpr) -> Any:
    """`sums + a w^T`, or its transpose."""
    if UPCAST:
        a, w = a.to(tl.float32), w.to(tl.float32)
    if SWAP:
        sums = tl.dot(w, tl.trans(a), sums, input_precision="ieee")
    else:
        sums = tl.dot(a, tl.trans(w), sums, input_precision="ieee")
    return sums


@jit()
def _add_scaled(
    sums: tl.tensor,
    a: tl.tensor,
    w: tl.tensor,
    row_scales: tl.tensor,
    w_scale: tl.tensor,
    SWAP: tl.constexpr,
    UPCAST: tl.constexpr,
) -> Any:
    """`_multiply_add` of a block in fp8."""
    products = _multiply_add(tl.zeros_like(sums), a, w, SWAP, UPCAST)
    scale = row_scales * w_scale
    return sums + products * (scale[None, :] if SWAP else scale[:, None])


@jit()
def compute_tile(
    out: tl.tensor,
    out_scales: tl.tensor,
    a: tl.tensor,
    a_stride: tl.tensor,
    a_scales: tl.tensor,
    a_scales_stride_expert: tl.tensor,
    a_scales_stride_row: tl.tensor,
    a_scales_stride_block: tl.tensor,
    w: tl.tensor,
    w_scales: tl.tensor,
    pair_weights: tl.tensor,
    capacity: tl.tensor,
    place: tl.tuple,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    FP8: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_W: tl.constexpr,
    SWAP: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute and store the tile at a place: its column tile, expert, first and last row, and the pairs of its rows if
    they are gathered or scattered. The other arguments are the kernel's (`moe.kernels.grouped_gemm`).
    """
    column_tile, expert, first_row, last_row, pairs = place
    COLUMN_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    W_ROWS: tl.constexpr = 2 * N if GATED else N  # of an expert
    rows = first_row + tl.arange(0, BLOCK_M)
    is_row = rows < last_row
    first_column = column_tile * BLOCK_N
    first_weight = expert * W_ROWS + first_column
    a_rows = pairs // TOP_K if GATHER else tl.where(is_row, rows, first_row)
    a_row = a_rows.to(tl.int64) * a_stride

    sums = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    up_sums = sums
    if FP8:  # one block of scales per iteration, loaded one iteration ahead: Triton prefetches only the matrices
        BLOCKS: tl.constexpr = K // _SCALED
        row_scales = a_scales + expert.to(tl.int64) * a_scales_stride_expert
        row_scales += (a_rows - expert * capacity).to(tl.int64) * a_scales_stride_row
        gate_scales = w_scales + first_weight // _SCALED * BLOCKS
        up_scales = gate_scales + (N // _SCALED * BLOCKS if GATED else 0)
        row_scale, gate_scale, up_scale = tl.load(row_scales), tl.load(gate_scales), tl.load(up_scales)
    for k in range(0, K, BLOCK_K):
        x = _load_rows(a, a_row, first_row, k, K, TMA_A, BLOCK_K)
        gate = _load_weights(w, first_weight, N - first_column, k, K, TMA_W, BLOCK_N, BLOCK_K)
        if GATED:
            up = _load_weights(w, first_weight + N, N - first_column, k, K, TMA_W, BLOCK_N, BLOCK_K)
        if FP8:
            block = tl.minimum(k // _SCALED + 1, BLOCKS - 1)
            next_row_scale = tl.load(row_scales + block * a_scales_stride_block)
            next_gate_scale, next_up_scale = tl.load(gate_scales + block), tl.load(up_scales + block)
            sums = _add_scaled(sums, x, gate, row_scale, gate_scale, SWAP, UPCAST)
            if GATED:
                up_sums = _add_scaled(up_sums, x, up, row_scale, up_scale, SWAP, UPCAST)
            row_scale, gate_scale, up_scale = next_row_scale, next_gate_scale, next_up_scale
        else:
            sums = _multiply_add(sums, x, gate, SWAP, UPCAST)
            if GATED:
                up_sums = _multiply_add(up_sums, x, up, SWAP, UPCAST)

    if GATED:
        sums = sums / (1.0 + tl.exp(tl.minimum(-sums, 80.0))) * up_sums  # never overflows
    if SWAP:
        sums = tl.trans(sums)
    if SCATTER:
        sums *= tl.load(pair_weights + pairs, mask=is_row, other=0)[:, None]
    columns = first_column + tl.arange(0, BLOCK_N)
    out_rows = (pairs if SCATTER else rows).to(tl.int64)
    if FP8 and GATED:
        scale = block_scale(sums)
        tl.store(out_scales + out_rows * COLUMN_TILES + column_tile, scale, mask=is_row)
        sums = to_fp8(sums / scale[:, None])
    place = out + out_rows[:, None] * N + columns[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_row[:, None] & (columns < N)[None, :])
