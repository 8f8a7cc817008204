"""Activations in fp8: float8_e4m3fn values, one float32 scale for every block of 128 along the hidden dimension.

    x = fp8 * scale,    scale = max |block| / 448

448 is the largest number of e4m3. Scales are per row, so a row's bits do not depend on its batch, and rows may be sent
one by one. A block of zeros gets a tiny scale, not 0. Source: DeepSeek-V3 (1 x 128 tiles), DeepEP's fp8 dispatch.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from ubatch import ConfigError

BLOCK = 128
FP8 = torch.float8_e4m3fn

_LARGEST = 448.0
_SCALE = 1 / _LARGEST
"""Multiplied by, because a GPU divides by a number of the host by multiplying by its inverse, and a CPU does not."""
_SMALLEST_AMAX = 1e-4


def quantize_blocks(x: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Round `x` to fp8, block by block.

    Args:
        x: `[..., H]`, floating; H must divide by `block`.
        block: numbers that share a scale.

    Returns:
        `[..., H]` float8_e4m3fn and `[..., H / block]` float32, both contiguous.

    Raises:
        ConfigError: H does not divide by `block`, or `x` is not floating.
    """
    if not x.is_floating_point() or x.dim() < 1 or x.shape[-1] % block:
        raise ConfigError(f"fp8 needs floating rows of a multiple of {block}, not {x.dtype} {list(x.shape)}.")
    blocks = x.unflatten(-1, (-1, block)).float()
    scales = blocks.abs().amax(-1).clamp(min=_SMALLEST_AMAX) * _SCALE
    # The quotient may round to slightly above the largest number, which would become NaN in this dtype.
    quantized = (blocks / scales.unsqueeze(-1)).clamp(-_LARGEST, _LARGEST).to(FP8)
    return quantized.flatten(-2), scales


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_blocks` of `[T, H]`, in one kernel if Triton runs: on a GPU, or in its interpreter."""
    if x.dim() != 2 or x.shape[1] % BLOCK or not x.is_floating_point() or not in_triton(x.device.type):
        return quantize_blocks(x)
    from moe.kernels.quantize import quantize_rows  # imports Triton

    return quantize_rows(x)


@cache
def in_triton(device_type: str) -> bool:
    """Whether Triton's kernels run on this type of device: on a GPU, or in the interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    from ubatch.kernels.triton_jit import INTERPRETED

    return device_type == "cuda" or INTERPRETED


def dequantize_blocks(x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantize_blocks`, within rounding.

    Args:
        x: `[..., H]` float8_e4m3fn.
        scales: `[..., H / block]` float32, any strides.
        dtype: of the result.

    Returns:
        `[..., H]`, contiguous.

    Raises:
        ConfigError: the scales do not fit.
    """
    check_scales(x, scales)
    if not scales.shape[-1]:
        return x.to(dtype)
    blocks = x.unflatten(-1, (scales.shape[-1], -1)).float()
    return (blocks * scales.unsqueeze(-1)).flatten(-2).to(dtype)


def check_scales(x: Tensor, scales: Tensor) -> None:
    """Refuse scales that do not belong to `x`.

    Raises:
        ConfigError: `x` is not fp8, or there is not one float32 scale for each of its blocks.
    """
    fits = x.shape[:-1] == scales.shape[:-1] and (
        x.shape[-1] % scales.shape[-1] == 0 if scales.shape[-1] else not x.shape[-1]
    )
    if x.dtype != FP8 or scales.dtype != torch.float32 or not fits:
        raise ConfigError(
            f"hidden_states {x.dtype} {list(x.shape)} and scales {scales.dtype} {list(scales.shape)} do not fit: "
            f"fp8 is {FP8} [..., H] with float32 scales [..., H / {BLOCK}]."
        )
