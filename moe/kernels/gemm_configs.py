"""The tiles in which a grouped GEMM may be computed: what the autotuner chooses from.

Sizes are for an H200: 132 SMs with 227 KiB of shared memory and 64 Ki registers each, 4.8 TB/s.

few rows (decode)     The weights are read once and hardly computed with: what counts is how many bytes are in flight.
                      By Little's law 36 KiB on every SM carry 4.8 TB/s at 1 us; these have 70 to 150. The rows are too
                      few for a tensor core instruction of Hopper, whose M is 64, so `swap` puts the weights there, and
                      the rows take N, which may be 16.
many rows (prefill)   128 x 256 results per program (gate and up are two of 128) keep the tensor cores fed from shared
                      memory; 64 rows waste less on the last tile of an expert.

One program per SM with deep buffers against several with shallow ones; `flatten` lets the first load the next tile
while it finishes one, which the second get from each other. Which wins is measured. Where tiles are claimed
(`moe.kernels.grouped_gemm`), the next one is not known before it is claimed, and no loop is flat.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch

from ubatch.kernels.triton_jit import INTERPRETED

__all__ = ["GemmConfig", "RowTile", "gemm_configs", "row_tiles"]

_FEWEST_ROWS = 16  # that a tensor core multiplies
_FEW_ROWS = 32
_MOST_ROWS = 128


@dataclass(frozen=True)
class RowTile:
    """How many rows of an expert make a tile, in both GEMMs.

    Attributes:
        rows: a power of two.
    """

    rows: int


@dataclass(frozen=True)
class GemmConfig:
    """How one program computes a tile.

    Attributes:
        columns: of the output, a power of two; of gate and of up each.
        depth: of a turn of the loop over the inner dimension, a power of two.
        num_stages: turns whose loads are in flight.
        num_warps: of the program.
        per_sm: programs that share an SM.
        swap: multiply weights by rows, and transpose the result.
        flatten: the loop over tiles and the one inside become one.
        claimed: programs claim tiles from a counter instead of being dealt every n-th; not with `flatten`.
        group: tiles of rows that are computed beside each other for each tile of columns, so that they find the weights
            in the L2 cache.
    """

    columns: int
    depth: int
    num_stages: int
    num_warps: int = 4
    per_sm: int = 1
    swap: bool = False
    flatten: bool = False
    claimed: bool = False
    group: int = 8


@cache
def row_tiles(rows_per_expert: float, dtype: torch.dtype) -> tuple[RowTile, ...]:
    """Tiles that may suit an expert with so many rows, the likeliest first.

    Args:
        rows_per_expert: expected.
        dtype: that is multiplied.
    """
    if INTERPRETED or dtype == torch.float32:
        return (RowTile(_FEWEST_ROWS),)
    fitting = _FEWEST_ROWS
    while fitting < rows_per_expert and fitting < _MOST_ROWS:
        fitting *= 2
    candidates = (fitting, fitting // 2, 2 * fitting if 2 * rows_per_expert > fitting else 0)
    return tuple(RowTile(rows) for rows in candidates if _FEWEST_ROWS <= rows <= _MOST_ROWS)


@cache
def gemm_configs(
    rows: int, dtype: torch.dtype, *, gated: bool, one_per_sm: bool = False, claimed: bool = False
) -> tuple[GemmConfig, ...]:
    """What to try, the default first.

    Args:
        rows: of a tile.
        dtype: that is multiplied.
        gated: gate and up side by side, so twice the columns.
        one_per_sm: only configs with one program per SM, which can keep to a number of SMs.
        claimed: for a GEMM beside kernels that may hold SMs: no program's tiles wait for it to start.
    """
    configs: Iterable[GemmConfig] = _candidates(rows, dtype, gated)
    if one_per_sm:
        configs = (replace(config, per_sm=1) for config in configs)
    if claimed:
        configs = (replace(config, flatten=False, claimed=True) for config in configs)
    return tuple(dict.fromkeys(configs))


def _candidates(rows: int, dtype: torch.dtype, gated: bool) -> Iterator[GemmConfig]:
    fp8 = dtype == torch.float8_e4m3fn
    if INTERPRETED:
        yield GemmConfig(128 if fp8 else 32, 128 if fp8 else 32, 1, group=2)
    elif dtype == torch.float32:
        yield GemmConfig(64, 32, 2)
    elif fp8:
        yield from _fp8(rows)
    elif rows <= _FEW_ROWS:
        yield from _few_rows_gated(rows) if gated else _few_rows_down(rows)
    else:
        yield from _many_rows_gated(rows) if gated else _many_rows_down(rows)


def _few_rows_gated(rows: int) -> Iterator[GemmConfig]:
    if rows == _FEWEST_ROWS:
        yield GemmConfig(64, 128, 3, per_sm=2, swap=True, group=1)
        yield GemmConfig(64, 64, 4, per_sm=3, swap=True, group=1)
    else:
        yield GemmConfig(64, 64, 5, per_sm=2, swap=True, group=1)
        yield GemmConfig(64, 64, 3, per_sm=3, swap=True, group=1)
    yield GemmConfig(64, 128, 4, swap=True, flatten=True, group=1)
    yield GemmConfig(128, 64, 3, per_sm=2, swap=True, group=1)
    yield GemmConfig(128, 64, 5, num_warps=8, swap=True, flatten=True, group=1)
    yield GemmConfig(64, 128, 3, per_sm=2, group=1)
    yield GemmConfig(32, 128, 5, per_sm=2, group=1)
    yield GemmConfig(32, 256, 3, per_sm=2, group=1)


def _few_rows_down(rows: int) -> Iterator[GemmConfig]:
    if rows == _FEWEST_ROWS:
        yield GemmConfig(128, 128, 3, per_sm=2, swap=True, group=1)
        yield GemmConfig(128, 64, 4, per_sm=3, swap=True, group=1)
    else:
        yield GemmConfig(128, 64, 5, per_sm=2, swap=True, group=1)
        yield GemmConfig(128, 64, 3, per_sm=3, swap=True, group=1)
    yield GemmConfig(128, 128, 4, swap=True, flatten=True, group=1)
    yield GemmConfig(64, 128, 4, per_sm=2, swap=True, group=1)
    yield GemmConfig(64, 128, 3, per_sm=3, swap=True, group=1)
    yield GemmConfig(64, 256, 3, swap=True, flatten=True, group=1)
    yield GemmConfig(64, 128, 5, per_sm=2, group=1)
    yield GemmConfig(64, 256, 3, per_sm=2, group=1)


def _many_rows_gated(rows: int) -> Iterator[GemmConfig]:
    yield GemmConfig(128, 64, 4, num_warps=8)
    yield GemmConfig(128, 64, 3, num_warps=8)
    yield GemmConfig(128, 64, 3, num_warps=8, flatten=True)
    yield GemmConfig(64, 64, 3, per_sm=2)
    if rows < _MOST_ROWS:
        yield GemmConfig(128, 64, 4, num_warps=8, swap=True)
        yield GemmConfig(128, 64, 4, num_warps=8, swap=True, flatten=True)


def _many_rows_down(rows: int) -> Iterator[GemmConfig]:
    yield GemmConfig(256, 64, 4, num_warps=8)
    yield GemmConfig(256, 64, 3, num_warps=8)
    yield GemmConfig(256, 64, 3, num_warps=8, flatten=True)
    yield GemmConfig(128, 64, 3, per_sm=2)
    yield GemmConfig(128, 64, 3, num_warps=8, per_sm=2)
    if rows < _MOST_ROWS:
        yield GemmConfig(256, 64, 4, num_warps=8, swap=True)


def _fp8(rows: int) -> Iterator[GemmConfig]:
    """Columns and depth are the scales' blocks of 128; many warps, because sums wait in registers to be scaled."""
    if rows <= _FEW_ROWS:
        yield GemmConfig(128, 128, 3, per_sm=2, swap=True, group=1)
        yield GemmConfig(128, 128, 5, num_warps=8, swap=True, group=1)
        yield GemmConfig(128, 128, 3, per_sm=2, group=1)
        if rows == _FEWEST_ROWS:
            yield GemmConfig(128, 128, 5, swap=True, flatten=True, group=1)
            yield GemmConfig(128, 128, 3, num_warps=8, per_sm=2, swap=True, group=1)
        else:
            yield GemmConfig(128, 128, 5, num_warps=8, swap=True, flatten=True, group=1)
    else:
        yield GemmConfig(128, 128, 4, num_warps=8)
        yield GemmConfig(128, 128, 3, num_warps=8)
        yield GemmConfig(128, 128, 3, num_warps=8, flatten=True)
        yield GemmConfig(128, 128, 3, num_warps=16)
