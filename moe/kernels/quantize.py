"""Rounds to fp8: activations with a scale for every 128 elements of a row, weights with one per block of 128 x 128.

The torch reference for activations is `moe.experts.quantization`: the same bits, since scales are products, and what is
divided by them is divided exactly. Weights are rounded once, in torch.

Source: DeepSeek-V3.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ubatch import ConfigError
from ubatch.kernels import rows_contiguous
from ubatch.kernels.triton_jit import cdiv, constant, jit, power_of_2, to_fp8, undefined

BLOCK = 128
_BLOCK = constant(BLOCK)
_INVERSE = 1 / 448.0  # as in `moe.experts.quantization`, which must not import Triton
_SCALE = constant(_INVERSE)
_SMALLEST_AMAX = constant(1e-4)
_MAX_BLOCKS = 16  # blocks of 128 that one program holds


@jit()
def block_scale(x: tl.tensor) -> Any:
    """The scales of float32 rows `[rows, 128]`, one per row."""
    return tl.maximum(tl.max(tl.abs(x), 1), _SMALLEST_AMAX) * _SCALE


@jit("rows_per_expert", "capacity")
def _quantize_kernel(
    out: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    x_stride: tl.tensor,
    rows_per_expert: tl.tensor,
    capacity: tl.tensor,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BATCHES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if BATCHES and row % capacity >= tl.load(rows_per_expert + row // capacity):
        return
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = blocks < NUM_BLOCKS
    places = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    numbers = tl.load(x + row * x_stride + places, mask=inside[:, None], other=0).to(tl.float32)
    scale = block_scale(numbers)
    tl.store(scales + row * NUM_BLOCKS + blocks, scale, mask=inside)
    tl.store(out + row * NUM_BLOCKS * _BLOCK + places, to_fp8(tl.div_rn(numbers, scale[:, None])), mask=inside[:, None])


def quantize_rows(x: Tensor, rows_per_expert: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round rows to fp8, block by block.

    Args:
        x: `[N, H]`, floating; H a multiple of 128; rows may be strided.
        rows_per_expert: `[E]` int32 if x is `[E * C, H]`: the number of each expert's C rows that are rounded; the
            results of the other rows are undefined.

    Returns:
        `[N, H]` float8_e4m3fn and `[N, H / 128]` float32, both contiguous.
    """
    rows, columns = x.shape
    num_blocks = columns // BLOCK
    out = undefined(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = undefined(rows, num_blocks, dtype=torch.float32, device=x.device)
    if rows and columns:
        x = rows_contiguous(x)
        blocks = min(power_of_2(num_blocks), _MAX_BLOCKS)
        _quantize_kernel[rows, cdiv(num_blocks, blocks)](
            *(out, scales, x, x.stride(0), rows_per_expert),
            1 if rows_per_expert is None else rows // rows_per_expert.shape[0],
            NUM_BLOCKS=num_blocks,
            BLOCKS=blocks,
            BATCHES=rows_per_expert is not None,
        )
    return out, scales


def quantize_weights(w: Tensor) -> tuple[Tensor, Tensor]:
    """Round weights to fp8, one expert at a time, so that it takes little memory in addition to the result.

    Args:
        w: `[E, N, K]`, floating; N and K multiples of 128.

    Returns:
        `[E, N, K]` float8_e4m3fn and `[E, N / 128, K / 128]` float32, both contiguous.

    Raises:
        ConfigError: N or K is not a multiple of 128, or `w` is not floating.
    """
    if w.dim() != 3 or w.shape[1] % BLOCK or w.shape[2] % BLOCK or not w.is_floating_point():
        raise ConfigError(f"fp8 needs floating weights in blocks of {BLOCK} x {BLOCK}, not {w.dtype} {list(w.shape)}.")
    out = torch.empty(w.shape, dtype=torch.float8_e4m3fn, device=w.device)
    scales = torch.empty(w.shape[0], w.shape[1] // BLOCK, w.shape[2] // BLOCK, device=w.device)
    for expert in range(w.shape[0]):
        blocks = w[expert].float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        scale = blocks.abs().amax((1, 3)).clamp(min=1e-4) * _INVERSE
        rounded = (blocks / scale[:, None, :, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        out[expert], scales[expert] = rounded.flatten(2).flatten(0, 1), scale
    return out, scales
