"""Root-mean-square norms: alone, or fused with the addition to the residual before them.

    norm        y = x / sqrt(mean(x ** 2) + eps) * weight
    add norm    residual = residual + x, rounded to its dtype; then the norm of that

One program holds one row, in float32. The torch reference is in `model_runner.decoder.ops`.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

import torch
import triton.language as tl
from torch import Tensor

from ubatch.kernels import rows_contiguous
from ubatch.kernels.triton_jit import INTERPRETED, jit, power_of_2


@jit()
def _norm_kernel(
    out: tl.tensor,
    summed: tl.tensor,
    x: tl.tensor,
    x_stride: tl.tensor,
    residual: tl.tensor,
    residual_stride: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < SIZE
    value = tl.load(x + row * x_stride + place, mask=inside, other=0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * residual_stride + place, mask=inside, other=0).to(tl.float32)
        value = value.to(summed.dtype.element_ty)
        tl.store(summed + row * SIZE + place, value, mask=inside)
        value = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    weights = tl.load(weight + place, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * SIZE + place, value * factor * weights, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` `[..., size]` normalised over its last dimension; contiguous, in the dtype of `x`.

    Args:
        x: floating point; rows may be strided, as in a slice of a fused projection.
        weight: `[size]`.
    """
    rows = rows_contiguous(x.reshape(-1, x.shape[-1]))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(out, None, rows, None, weight, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of `residual + x`, and the sum; both contiguous, in the residual's dtype.

    Args:
        x: `[..., size]`, floating point.
        residual: the same shape.
        weight: `[size]`.
    """
    out, summed = (torch.empty(residual.shape, dtype=residual.dtype, device=x.device) for _ in range(2))
    rows, residual_rows = (rows_contiguous(each.reshape(-1, each.shape[-1])) for each in (x, residual))
    _launch(out, summed, rows, residual_rows, weight, eps)
    return out, summed


def _launch(
    out: Tensor, summed: Tensor | None, rows: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> None:
    num_rows, size = rows.shape
    if not num_rows:
        return
    block = power_of_2(size)
    inputs = rows, rows.stride(0), residual, 0 if residual is None else residual.stride(0), weight, eps
    warps = 1 if INTERPRETED else max(1, min(16, block // 512))
    _norm_kernel[num_rows,](
        out, summed, *inputs, SIZE=size, HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=warps
    )
