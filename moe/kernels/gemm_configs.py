"""The tile configurations of a grouped GEMM that the autotuner chooses from.

Sizes are for an H200: 132 SMs with 227 KiB of shared memory and 64 Ki registers each, 4.8 TB/s.

few rows (decode)     The weights are read once and need little compute, so speed depends on the bytes in flight. By
                      Little's law 36 KiB per SM give 4.8 TB/s at 1 us latency; these configs have 70 to 150 KiB. A
                      tensor core instruction of Hopper has M = 64, more than there are rows, so `swap` makes the
                      weights M and the rows N, which may be 16.
many rows (prefill)   128 x 256 results per program (gate and up are two of 128) keep the tensor cores fed from shared
                      memory; 64 rows waste less on the last tile of an expert.

Some configs have one program per SM with deep buffers, others several with shallow ones, which overlap with each other.
Which is faster is measured. No config merges the loop over tiles with its inner loop (`tl.range(flatten=True)`): what
Triton 3.6 compiles of that for an H200 is wrong, in both projections and in every dtype.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch

from ubatch.kernels.triton_jit import INTERPRETED

_FEWEST_ROWS = 16  # fewest rows of a tensor core instruction
_FEW_ROWS = 32
_MOST_ROWS = 128


@dataclass(frozen=True)
class RowTile:
    """The number of rows of a tile, in both GEMMs.

    Attributes:
        rows: a power of two.
    """

    rows: int


@dataclass(frozen=True)
class GemmConfig:
    """How one program computes a tile.

    Attributes:
        columns: output columns of a tile, a power of two; gate and up have this many each.
        depth: elements of the inner dimension per loop iteration, a power of two.
        num_stages: iterations whose loads are in flight.
        per_sm: programs that share an SM.
        swap: multiply weights by rows, and transpose the result.
        claimed: programs claim tiles from a counter instead of taking every n-th.
        group: row tiles that are computed one after the other for each column tile, so that they find the weights in
            the L2 cache.
    """

    columns: int
    depth: int
    num_stages: int
    num_warps: int = 4
    per_sm: int = 1
    swap: bool = False
    claimed: bool = False
    group: int = 8


@cache
def row_tiles(rows_per_expert: float, dtype: torch.dtype) -> tuple[RowTile, ...]:
    """Tiles to try for experts with this many rows, the likeliest first.

    Args:
        rows_per_expert: expected rows of an expert.
        dtype: dtype that is multiplied.
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
    """The configs to try, the default first.

    Args:
        dtype: dtype that is multiplied.
        gated: gate and up side by side, so twice the columns.
        one_per_sm: only configs with one program per SM, which can limit the GEMM to a number of SMs.
        claimed: claim tiles. For a GEMM next to kernels that may hold SMs: a program that starts late delays no tile.
    """
    configs: Iterable[GemmConfig] = _candidates(rows, dtype, gated)
    if one_per_sm:
        configs = (replace(config, per_sm=1) for config in configs)
    if claimed:
        configs = (replace(config, claimed=True) for config in configs)
    return tuple(dict.fromkeys(configs))


def _candidates(rows: int, dtype: torch.dtype, gated: bool) -> Iterator[GemmConfig]:
    fp8 = dtype == torch.float8_e4m3fn
    if INTERPRETED:
        yield GemmConfig(128 if fp8 else 32, 128 if fp8 else 32, 1, group=2)
    elif dtype == torch.float32:
        yield GemmConfig(64, 32, 2)
    elif fp8:
        yield from _fp8(rows, gated)
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
    yield GemmConfig(64, 128, 4, swap=True, group=1)
    yield GemmConfig(128, 64, 3, per_sm=2, swap=True, group=1)
    yield GemmConfig(128, 64, 5, num_warps=8, swap=True, group=1)
    yield GemmConfig(64, 128, 3, per_sm=2, group=1)
    yield GemmConfig(32, 128, 5, per_sm=2, group=1)
    if rows == _FEWEST_ROWS:  # with more, it spills
        yield GemmConfig(32, 256, 3, per_sm=2, group=1)


def _few_rows_down(rows: int) -> Iterator[GemmConfig]:
    if rows == _FEWEST_ROWS:
        yield GemmConfig(128, 128, 3, per_sm=2, swap=True, group=1)
        yield GemmConfig(128, 64, 4, per_sm=3, swap=True, group=1)
    else:
        yield GemmConfig(128, 64, 5, per_sm=2, swap=True, group=1)
        yield GemmConfig(128, 64, 3, per_sm=3, swap=True, group=1)
    yield GemmConfig(128, 128, 4, swap=True, group=1)
    yield GemmConfig(64, 128, 4, per_sm=2, swap=True, group=1)
    yield GemmConfig(64, 128, 3, per_sm=3, swap=True, group=1)
    yield GemmConfig(64, 256, 3, swap=True, group=1)
    yield GemmConfig(64, 128, 5, per_sm=2, group=1)
    yield GemmConfig(64, 256, 3, per_sm=2, group=1)


def _many_rows_gated(rows: int) -> Iterator[GemmConfig]:
    yield GemmConfig(128, 64, 4, num_warps=8)
    yield GemmConfig(128, 64, 3, num_warps=8)
    yield GemmConfig(64, 64, 3, per_sm=2)
    if rows < _MOST_ROWS:
        yield GemmConfig(128, 64, 4, num_warps=8, swap=True)


def _many_rows_down(rows: int) -> Iterator[GemmConfig]:
    yield GemmConfig(256, 64, 4, num_warps=8)
    yield GemmConfig(256, 64, 3, num_warps=8)
    yield GemmConfig(128, 64, 3, per_sm=2)
    yield GemmConfig(128, 64, 3, num_warps=8, per_sm=2)
    if rows < _MOST_ROWS:
        yield GemmConfig(256, 64, 4, num_warps=8, swap=True)


def _fp8(rows: int, gated: bool) -> Iterator[GemmConfig]:
    """Columns and depth are 128, a block of the scales; many warps, because unscaled sums also take registers."""
    if rows <= _FEW_ROWS:
        yield GemmConfig(128, 128, 3, per_sm=2, swap=True, group=1)
        yield GemmConfig(128, 128, 5, num_warps=8, swap=True, group=1)
        yield GemmConfig(128, 128, 3, per_sm=2, group=1)
        if rows == _FEWEST_ROWS:
            yield GemmConfig(128, 128, 5, swap=True, group=1)
            yield GemmConfig(128, 128, 3, num_warps=8, per_sm=2, swap=True, group=1)
    else:
        configs = [GemmConfig(128, 128, stages, num_warps=warps) for stages, warps in ((4, 8), (3, 8), (3, 16))]
        if gated and rows == _MOST_ROWS:  # sums of gate and up, unscaled and scaled, spill in 8 warps
            configs.reverse()
        yield from configs
