"""The activation of a gated MLP, on the fused output of its first product: gates, then ups."""

import torch
import triton.language as tl
from torch import Tensor

from ubatch.kernels.tensors import rows_contiguous
from ubatch.kernels.triton_jit import cdiv, jit, power_of_2

__all__ = ["silu_mul"]

_MAX_BLOCK = 1024  # outputs of one program


@jit()
def _silu_mul_kernel(
    out: tl.tensor, gate_up: tl.tensor, stride: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    gate = tl.load(gate_up + row * stride + place, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + row * stride + SIZE + place, mask=inside, other=0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # never overflows
    sigmoid = tl.where(gate < 0, small, 1.0) / (1.0 + small)
    tl.store(out + row * SIZE + place, gate * sigmoid * up, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[T, 2 * size]` (gates, then ups): `[T, size]`, contiguous, computed in float32."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        gate_up = rows_contiguous(gate_up)
        block = min(power_of_2(size), _MAX_BLOCK)
        _silu_mul_kernel[tokens, cdiv(size, block)](out, gate_up, gate_up.stride(0), SIZE=size, BLOCK=block)
    return out
