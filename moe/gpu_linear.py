"""A linear layer whose weight stays in fp8, for inference on GPUs; it does not import Triton until it is called.

y = fp8(x) fp8(w)^T, both with their scales    w: a scale per block of 128 x 128, as stored in a checkpoint
                                               x: a scale for every 128 numbers of a row, rounded here
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.experts.quantization import BLOCK, FP8, in_triton
from moe.experts.registry import fp8_block
from ubatch import ConfigError, GradientError
from ubatch.kernels import add_bias

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fp8_linear_block(device: torch.device) -> tuple[int, int] | None:
    """Rows and columns that share a scale in `fp8_linear`; None where it does not run.

    It runs on a GPU with products in fp8 (compute capability 8.9), and on a CPU in Triton's interpreter.
    """
    return fp8_block("triton", device) if in_triton(device.type) else None


def fp8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight^T + bias`, with x rounded to fp8.

    Args:
        x: `[..., in]` bfloat16, float16 or float32; `in` is a multiple of 128.
        weight: `[out, in]` float8_e4m3fn, contiguous.
        scales: `[out / 128, in / 128]` float32, contiguous; the last block of rows may be smaller.
        bias: `[out]` of x's dtype.

    Returns:
        `[..., out]` of x's dtype.

    Raises:
        ConfigError: shapes, dtypes or devices do not fit, or no Triton runs there.
        GradientError: the call needs a gradient.
    """
    blocks = [-(-weight.shape[0] // BLOCK), weight.shape[-1] // BLOCK]
    if weight.dtype != FP8 or weight.shape[-1] % BLOCK or scales.dtype != torch.float32 or list(scales.shape) != blocks:
        raise ConfigError(
            f"a weight in fp8 is {FP8} [out, in], in blocks of {BLOCK} x {BLOCK} with float32 scales, not "
            f"{weight.dtype} {list(weight.shape)} with {scales.dtype} {list(scales.shape)}."
        )
    if x.dtype not in _DTYPES or x.shape[-1] != weight.shape[1] or x.device != weight.device:
        raise ConfigError(
            f"this layer in fp8 takes bfloat16, float16 or float32 [..., {weight.shape[1]}] on {weight.device}, not "
            f"{x.dtype} {list(x.shape)} on {x.device}."
        )
    if not in_triton(x.device.type):
        raise ConfigError(
            f"layers in fp8 are multiplied by Triton on CUDA, not on {x.device}. Load the checkpoint for this device: "
            "then its weights are dequantised. For tests, set TRITON_INTERPRET=1 before Triton is imported."
        )
    if torch.is_grad_enabled() and x.requires_grad:
        raise GradientError("layers in fp8 have no backward. Run under torch.no_grad().")
    from moe.kernels.fp8_linear import multiply_fp8  # imports Triton

    rows = x.reshape(-1, x.shape[-1])
    out = multiply_fp8(rows, weight, scales, x.dtype if bias is None else torch.float32)
    if bias is not None:
        out = add_bias(out, bias)
    return out.view(*x.shape[:-1], weight.shape[0])
