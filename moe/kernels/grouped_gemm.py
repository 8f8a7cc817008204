"""A GEMM per expert in one launch: few programs, each of which computes one tile after the other.

    project_up      rows of tokens (gathered) or of batches -> silu(x w1^T) * (x w3^T), one row each
    project_down    those rows -> . w2^T, times the router's weight and at the pair's place, or unweighted and in order

A tile is up to `Tiles.rows` rows of one expert by some columns. The tile list holds only tiles with rows, so experts
without rows cost nothing. The tensor memory accelerator, if the GPU has one, loads weights and contiguous rows;
gathered rows are loaded by addresses. A tile may read beyond its expert's last row or column, but stores none of that.

    dealt      each of n programs computes every n-th tile; good if all programs start at once
    claimed    a program claims the next free tile (`GemmConfig.claimed`); good if other kernels hold SMs, because the
               other programs compute the tiles of one that starts late

The claim counters are stored next to the number of tiles, one per projection, and are zero when the tiles are made.
Every program's last claim finds no tile. The last program resets the counter to 0, for the next launch on these tiles.

In fp8 every 128 elements of the inner dimension are summed separately and scaled; `project_up` returns fp8, too.

Source: persistent matmul and grouped ordering of Triton's tutorials; scales per block of DeepSeek-V3.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from moe.kernels.align import Alignment, Tiles
from moe.kernels.gemm_configs import GemmConfig
from moe.kernels.gemm_tile import compute_tile, tile_place
from moe.kernels.quantize import BLOCK
from ubatch.kernels.triton_jit import INTERPRETED, cdiv, descriptor, jit, undefined


@dataclass(frozen=True)
class Rows:
    """The rows that a GEMM multiplies.

    Attributes:
        x: `[R, K]`; rows may be strided, each is contiguous.
        scales: float32 scales if x is fp8, `[R, K / 128]`, or `[E, C, K / 128]` for batches with any strides; else
            None.
    """

    x: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True)
class Weights:
    """The weights of all local experts.

    Attributes:
        w: `[E, columns, K]`, contiguous.
        scales: if w is fp8, `[E, columns / 128, K / 128]` float32, contiguous; else None.
    """

    w: Tensor
    scales: Tensor | None = None

    def descriptor(self, columns: int, depth: int) -> Any:
        """See `ubatch.kernels.triton_jit.descriptor`; of tiles of all experts' rows. Made once per size."""
        made, tile = self._descriptors, (columns, depth)
        if tile not in made:
            made[tile] = descriptor(self.w.flatten(0, 1), tile)
        return made[tile]

    @cached_property
    def _descriptors(self) -> dict[tuple[int, int], Any]:
        return {}


@jit()
def _load_tile(
    tiles: tl.tensor,
    pair_of_row: tl.tensor,
    tile: tl.tensor,
    row_tiles: tl.tensor,
    COLUMN_TILES: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> Any:
    """A tile's column tile, expert, first and last row, and the rows' pairs; no rows if the tile does not exist."""
    exists = tile < row_tiles * COLUMN_TILES
    row_tile, column_tile = tile_place(tile, row_tiles, COLUMN_TILES, GROUP)
    entry = tiles + row_tile * 3
    expert = tl.load(entry, mask=exists, other=0)
    first_row = tl.load(entry + 1, mask=exists, other=0)
    last_row = tl.load(entry + 2, mask=exists, other=0)
    pairs = first_row + tl.arange(0, BLOCK_M)
    if HAS_PAIRS:
        pairs = tl.load(pair_of_row + pairs, mask=pairs < last_row, other=0)
    return column_tile, expert, first_row, last_row, pairs


@jit()
def _claim(claims: tl.tensor, tiles: tl.tensor) -> Any:
    """Claim the next free tile; returns `tiles` or more if there is none."""
    tile = tl.atomic_add(claims, 1, sem="relaxed")
    if tile == tiles + tl.num_programs(0) - 1:  # the last claim of all programs
        tl.atomic_xchg(claims, 0, sem="relaxed")
    return tile


@jit("tiles", "counters", "pair_of_row", "pair_weights", "capacity")
def _grouped_gemm_kernel(
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
    tiles: tl.tensor,
    counters: tl.tensor,
    pair_of_row: tl.tensor,
    pair_weights: tl.tensor,
    capacity: tl.tensor,
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
    CLAIMED: tl.constexpr,
    GROUP: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    COLUMN_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    HAS_PAIRS: tl.constexpr = GATHER or SCATTER
    row_tiles, programs = tl.load(counters), tl.num_programs(0)
    num_tiles, claims = row_tiles * COLUMN_TILES, counters + (1 if GATED else 2)
    if CLAIMED:
        tile = _claim(claims, num_tiles)
        while tile < num_tiles:
            place = _load_tile(tiles, pair_of_row, tile, row_tiles, COLUMN_TILES, GROUP, HAS_PAIRS, BLOCK_M)
            compute_tile(
                out,
                out_scales,
                a,
                a_stride,
                a_scales,
                a_scales_stride_expert,
                a_scales_stride_row,
                a_scales_stride_block,
                w,
                w_scales,
                pair_weights,
                capacity,
                place,
                N,
                K,
                TOP_K,
                GATED,
                GATHER,
                SCATTER,
                FP8,
                TMA_A,
                TMA_W,
                SWAP,
                UPCAST,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
            tile = _claim(claims, num_tiles)
    else:
        program = tl.program_id(0)
        place = _load_tile(tiles, pair_of_row, program, row_tiles, COLUMN_TILES, GROUP, HAS_PAIRS, BLOCK_M)
        for dealt in tl.range(program, num_tiles, programs):
            next_place = _load_tile(
                tiles, pair_of_row, dealt + programs, row_tiles, COLUMN_TILES, GROUP, HAS_PAIRS, BLOCK_M
            )
            compute_tile(
                out,
                out_scales,
                a,
                a_stride,
                a_scales,
                a_scales_stride_expert,
                a_scales_stride_row,
                a_scales_stride_block,
                w,
                w_scales,
                pair_weights,
                capacity,
                place,
                N,
                K,
                TOP_K,
                GATED,
                GATHER,
                SCATTER,
                FP8,
                TMA_A,
                TMA_W,
                SWAP,
                UPCAST,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
            place = next_place


def project_up(
    rows: Rows,
    weights: Weights,
    work: Alignment | Tiles,
    top_k: int,
    config: GemmConfig,
    num_programs: int,
    *,
    compile_only: bool = False,
) -> Rows:
    """Gate and up projections with their activation.

    Args:
        rows: `[N, H]` tokens, or `[E * C, H]` batches; fp8 if the weights are.
        weights: w13 `[E, 2 * I, H]`.
        work: an alignment of the tokens' pairs, or the tiles of batches.
        top_k: pairs of a token.
        num_programs: SMs to use, with `config.per_sm` programs each.
        compile_only: compile the kernel for later. Launches and allocates nothing; the result is empty.

    Returns:
        `[N * k, I]` in the alignment's order, or `[E * C, I]`; with scales if `rows` has them. Rows behind an expert's
        last row are uninitialised.
    """
    x, columns = rows.x, weights.w.shape[1] // 2
    aligned = isinstance(work, Alignment)
    num_rows = work.pair_of_row.shape[0] if isinstance(work, Alignment) else x.shape[0]
    num_rows = 0 if compile_only else num_rows
    out = undefined(num_rows, columns, dtype=x.dtype, device=x.device)
    scales = None
    if rows.scales is not None:
        scales = undefined(num_rows, columns // BLOCK, dtype=torch.float32, device=x.device)
    _launch(
        out, scales, rows, weights, work, config, num_programs, compile_only, top_k=top_k, gated=True, gather=aligned
    )
    return Rows(out, scales)


def project_down(
    rows: Rows,
    weights: Weights,
    work: Alignment | Tiles,
    topk_weights: Tensor | None,
    dtype: torch.dtype,
    config: GemmConfig,
    num_programs: int,
    *,
    compile_only: bool = False,
) -> Tensor:
    """The down projection.

    Args:
        rows: from `project_up`.
        weights: w2 `[E, H, I]`.
        work: the same as for `project_up`.
        topk_weights: `[N, k]` float32 of an alignment's pairs, contiguous; None for batches.
        num_programs: SMs to use, with `config.per_sm` programs each.
        compile_only: compile the kernel for later. Launches and allocates nothing; the result is empty.

    Returns:
        `[N * k, H]` in the order of the pairs, weighted; rows of other ranks' experts are uninitialised. For batches
        `[E * C, H]`.
    """
    num_rows = 0 if compile_only else rows.x.shape[0]
    out = undefined(num_rows, weights.w.shape[1], dtype=dtype, device=rows.x.device)
    _launch(out, None, rows, weights, work, config, num_programs, compile_only, topk_weights=topk_weights)
    return out


def _launch(
    out: Tensor,
    out_scales: Tensor | None,
    rows: Rows,
    weights: Weights,
    work: Alignment | Tiles,
    config: GemmConfig,
    num_programs: int,
    compile_only: bool,
    *,
    topk_weights: Tensor | None = None,
    top_k: int = 1,
    gated: bool = False,
    gather: bool = False,
) -> None:
    tiles = work.tiles if isinstance(work, Alignment) else work
    x, w, a_scales = rows.x, weights.w, rows.scales
    columns, depth = out.shape[1], x.shape[1]
    a_desc = None if gather else descriptor(x, (tiles.rows, config.depth))
    w_desc = weights.descriptor(config.columns, config.depth)
    scale_strides: tuple[int, ...] = (0, 0, 0)
    capacity = 0
    if a_scales is not None:
        batches = a_scales.dim() == 3
        scale_strides = a_scales.stride() if batches else (0, *a_scales.stride())
        capacity = a_scales.shape[1] if batches else 0
    grid = (min(tiles.most * cdiv(columns, config.columns), num_programs * config.per_sm),)
    launch = partial(_grouped_gemm_kernel.warmup, grid=grid) if compile_only else _grouped_gemm_kernel[grid]
    launch(
        *(out, out_scales),
        *(x if a_desc is None else a_desc, x.stride(0), a_scales, *scale_strides),
        *(w if w_desc is None else w_desc, weights.scales),
        *(tiles.table, tiles.counters, work.pair_of_row if isinstance(work, Alignment) else None),
        *(topk_weights, capacity),
        N=columns,
        K=depth,
        TOP_K=top_k,
        GATED=gated,
        GATHER=gather,
        SCATTER=topk_weights is not None,
        FP8=a_scales is not None,
        TMA_A=a_desc is not None,
        TMA_W=w_desc is not None,
        SWAP=config.swap,
        CLAIMED=config.claimed,
        GROUP=config.group,
        UPCAST=INTERPRETED,
        BLOCK_M=tiles.rows,
        BLOCK_N=config.columns,
        BLOCK_K=config.depth,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def reference_project_up(x: Tensor, w13: Tensor) -> Tensor:
    """`project_up` for one expert's rows `[R, H]` and weight `[2 * I, H]`, in float32."""
    gate, up = (x.float() @ w13.float().mT).chunk(2, dim=1)
    return F.silu(gate) * up


def reference_project_down(x: Tensor, w2: Tensor, weights: Tensor | None = None) -> Tensor:
    """`project_down` for one expert's rows `[R, I]` and weight `[H, I]`, in float32; `weights` is `[R]`."""
    y = x.float() @ w2.float().mT
    return y if weights is None else y * weights[:, None]
