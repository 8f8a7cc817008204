"""The loop at the heart of the grouped GEMM: a tile of rows by one of columns, along the inner dimension.

Rows and weights, `[rows, K]` and `[columns, K]`, both lie densely along K. They come through the tensor memory
accelerator (TMA) where `a` or `w` is a descriptor, else by their addresses; Triton's pipeline keeps several turns'
loads in flight either way. With SWAP the product is transposed: weights by rows.
"""

from typing import Any

import triton.language as tl

from moe.kernels.quantize import BLOCK
from ubatch.triton_jit import constant, jit

__all__ = ["multiply", "multiply_fp8"]

_SCALED = constant(BLOCK)


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
    """`[BLOCK_M, BLOCK_K]`, from row `first_row` on, or the rows that begin at `a_row` `[BLOCK_M]`."""
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
    """`[BLOCK_N, BLOCK_K]`, from row `first` of `w` `[E * columns, K]` on."""
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
def multiply(
    sums: tl.tensor,
    a: tl.tensor,
    a_row: tl.tensor,
    first_row: tl.tensor,
    w: tl.tensor,
    first_weight: tl.tensor,
    columns_left: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_W: tl.constexpr,
    SWAP: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> Any:
    """A tile's products summed, onto zeros; of gate and of up, or twice the same."""
    up_sums = sums
    for k in range(0, K, BLOCK_K):
        x = _load_rows(a, a_row, first_row, k, K, TMA_A, BLOCK_K)
        gate = _load_weights(w, first_weight, columns_left, k, K, TMA_W, BLOCK_N, BLOCK_K)
        if GATED:
            up = _load_weights(w, first_weight + N, columns_left, k, K, TMA_W, BLOCK_N, BLOCK_K)
            sums = _multiply_add(sums, x, gate, SWAP, UPCAST)
            up_sums = _multiply_add(up_sums, x, up, SWAP, UPCAST)
        else:
            sums = _multiply_add(sums, x, gate, SWAP, UPCAST)
    return sums, up_sums


@jit()
def multiply_fp8(
    sums: tl.tensor,
    a: tl.tensor,
    a_row: tl.tensor,
    a_scales: tl.tensor,
    a_scales_stride_block: tl.tensor,
    first_row: tl.tensor,
    w: tl.tensor,
    w_scales: tl.tensor,
    first_weight: tl.tensor,
    columns_left: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_W: tl.constexpr,
    SWAP: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> Any:
    """`multiply` in fp8, a block of scales in every turn. `a_scales` points to each row's first scale.

    Scales are loaded a turn before they are used: Triton's pipeline is for what is multiplied.
    """
    BLOCKS: tl.constexpr = K // _SCALED
    gate_scales = w_scales + first_weight // _SCALED * BLOCKS
    up_scales = gate_scales + (N // _SCALED * BLOCKS if GATED else 0)
    row_scale, gate_scale, up_scale = tl.load(a_scales), tl.load(gate_scales), tl.load(up_scales)
    up_sums = sums
    for k in range(0, K, BLOCK_K):
        x = _load_rows(a, a_row, first_row, k, K, TMA_A, BLOCK_K)
        gate = _load_weights(w, first_weight, columns_left, k, K, TMA_W, BLOCK_N, BLOCK_K)
        block = tl.minimum(k // _SCALED + 1, BLOCKS - 1)
        next_row_scale = tl.load(a_scales + block * a_scales_stride_block)
        next_gate_scale = tl.load(gate_scales + block)
        if GATED:
            up = _load_weights(w, first_weight + N, columns_left, k, K, TMA_W, BLOCK_N, BLOCK_K)
            next_up_scale = tl.load(up_scales + block)
            sums = _add_scaled(sums, x, gate, row_scale, gate_scale, SWAP, UPCAST)
            up_sums = _add_scaled(up_sums, x, up, row_scale, up_scale, SWAP, UPCAST)
            up_scale = next_up_scale
        else:
            sums = _add_scaled(sums, x, gate, row_scale, gate_scale, SWAP, UPCAST)
        row_scale, gate_scale = next_row_scale, next_gate_scale
    return sums, up_sums
