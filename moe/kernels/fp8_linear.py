"""A linear layer in fp8: one program per tile of `[T, K] x [N, K]^T`, in the order of the grouped GEMM.

Every 128 numbers of a row have a scale, and every block of 128 x 128 of the weight. Products of 128 numbers of the
inner dimension are summed in float32, scaled and added up (`moe.kernels.gemm_tile`). The last block of rows of the
weight may be smaller. Nothing is read on the host, and the launch depends on T alone, so a graph can capture it.

Source: DeepSeek-V3.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
import triton.language as tl
from torch import Tensor

from moe.kernels.gemm_tile import compute_tile, tile_place
from moe.kernels.quantize import BLOCK, quantize_rows
from ubatch.kernels import autotune
from ubatch.kernels.triton_jit import INTERPRETED, cdiv, constant, descriptor, jit, power_of_2, undefined

_COMPARED_ROWS = 1024  # of what tiles compute
_SCALED = constant(BLOCK)
_GROUP = constant(8)  # row tiles that follow each other, so that they find the weights in the L2 cache
_FEWEST_ROWS, _MOST_ROWS = 16, 128


@dataclass(frozen=True)
class LinearTile:
    """How one program computes a tile.

    Attributes:
        rows: rows of a tile, a power of two.
        columns: output columns of a tile, a power of two up to 128, so that they share one block's scale.
        num_stages: blocks of 128 of the inner dimension whose loads are in flight.
        swap: multiply weights by rows, and transpose the result: tensor cores take at least 64 of their first operand.
    """

    rows: int
    columns: int
    num_stages: int
    num_warps: int = 4
    swap: bool = False


@cache
def linear_tiles(rows: int) -> tuple[LinearTile, ...]:
    """The tiles to try for this many rows, a power of two; the default first."""
    return tuple(_candidates(rows))


def _candidates(rows: int) -> Iterator[LinearTile]:
    """Few rows need many programs, hence few columns, and many bytes in flight; many rows need large tiles."""
    if INTERPRETED:
        yield LinearTile(_FEWEST_ROWS, BLOCK, 1)
        return
    fitting = min(max(rows, _FEWEST_ROWS), _MOST_ROWS)
    if fitting <= 32:
        yield LinearTile(fitting, 64, 5, swap=True)
        yield LinearTile(fitting, 128, 4, swap=True)
        yield LinearTile(fitting, 64, 8, swap=True)
        yield LinearTile(fitting, 32, 6)
        yield LinearTile(fitting, 128, 5, num_warps=8, swap=True)
    else:
        yield LinearTile(fitting, 128, 4, num_warps=8)
        yield LinearTile(fitting, 128, 3, num_warps=8)
        yield LinearTile(fitting, 128, 3, num_warps=4 if fitting == 64 else 16)
        yield LinearTile(64, 64, 4)
        yield LinearTile(fitting, 64, 4, num_warps=8)


@jit("rows")
def _fp8_linear_kernel(
    out: tl.tensor,
    a: tl.tensor,
    a_scales: tl.tensor,
    w: tl.tensor,
    w_scales: tl.tensor,
    rows: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_W: tl.constexpr,
    SWAP: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    COLUMN_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    row_tiles = (rows + BLOCK_M - 1) // BLOCK_M
    row_tile, column_tile = tile_place(tl.program_id(0), row_tiles, COLUMN_TILES, _GROUP)
    first_row = row_tile * BLOCK_M
    only_expert = tl.full([], 0, tl.int32)
    place = (column_tile, only_expert, first_row, rows, first_row + tl.arange(0, BLOCK_M))
    compute_tile(
        out,
        None,
        a,
        K,
        a_scales,
        0,
        K // _SCALED,
        1,
        w,
        w_scales,
        None,
        0,
        place,
        N,
        K,
        TOP_K=1,
        GATED=False,
        GATHER=False,
        SCATTER=False,
        FP8=True,
        TMA_A=TMA_A,
        TMA_W=TMA_W,
        SWAP=SWAP,
        UPCAST=UPCAST,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=_SCALED,
    )


def multiply_fp8(x: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`x @ weight^T`, with the rows of x rounded to fp8.

    Args:
        x: `[T, K]`, floating; K a multiple of 128; rows may be strided.
        weight: `[N, K]` float8_e4m3fn, contiguous.
        scales: `[N / 128, K / 128]` float32, contiguous, rounded up.
        dtype: of the result.

    Returns:
        `[T, N]`, contiguous.
    """
    rows, depth = x.shape
    columns = weight.shape[0]
    if not rows:
        return x.new_empty(0, columns, dtype=dtype)
    multiply = partial(_launch, *quantize_rows(x), weight, scales, dtype)
    room = power_of_2(rows)
    tile = autotune(
        f"fp8 linear, {room} rows, {columns} x {depth} {dtype}",
        linear_tiles(room),
        multiply,
        prepare=partial(multiply, compile_only=True),
        answer=lambda tile: multiply(tile)[:: rows // _COMPARED_ROWS | 1],
        device=x.device,
    )
    return multiply(tile)


def _launch(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    tile: LinearTile,
    *,
    compile_only: bool = False,
) -> Tensor:
    """The product with this tile; `compile_only` launches and allocates nothing, and the result is empty."""
    rows, columns = x.shape[0], weight.shape[0]
    out = undefined(0 if compile_only else rows, columns, dtype=dtype, device=x.device)
    x_desc, w_desc = descriptor(x, (tile.rows, BLOCK)), descriptor(weight, (tile.columns, BLOCK))
    grid = (cdiv(rows, tile.rows) * cdiv(columns, tile.columns),)
    launch = partial(_fp8_linear_kernel.warmup, grid=grid) if compile_only else _fp8_linear_kernel[grid]
    launch(
        out,
        *(x if x_desc is None else x_desc, x_scales, weight if w_desc is None else w_desc, scales),
        rows,
        N=columns,
        K=weight.shape[1],
        TMA_A=x_desc is not None,
        TMA_W=w_desc is not None,
        SWAP=tile.swap,
        UPCAST=INTERPRETED,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
