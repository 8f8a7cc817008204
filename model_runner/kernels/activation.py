"""A gated MLP's activation, on the fused output of its first product (gates, then ups); and a gate on an output."""

import torch
import triton.language as tl
from torch import Tensor

from ubatch.kernels import rows_contiguous
from ubatch.kernels.triton_jit import cdiv, jit, power_of_2

_MAX_BLOCK = 1024  # outputs of one program


@jit()
def _sigmoid(x: tl.tensor) -> tl.tensor:
    small = tl.exp(-tl.abs(x))  # never overflows
    return tl.where(x < 0, small, 1.0) / (1.0 + small)


@jit()
def _silu_mul_kernel(
    out: tl.tensor, gate_up: tl.tensor, stride: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    gate = tl.load(gate_up + row * stride + place, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + row * stride + SIZE + place, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * SIZE + place, gate * _sigmoid(gate) * up, mask=inside)


@jit()
def _sigmoid_mul_kernel(
    out: tl.tensor,
    gate: tl.tensor,
    gate_stride: tl.tensor,
    x: tl.tensor,
    x_stride: tl.tensor,
    SIZE: tl.constexpr,
    ONE_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    factor = tl.load(gate + row * gate_stride + (place * 0 if ONE_GATE else place), mask=inside, other=0)
    value = tl.load(x + row * x_stride + place, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * SIZE + place, _sigmoid(factor.to(tl.float32)) * value, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[T, 2 * size]` (gates, then ups): `[T, size]`, contiguous, computed in float32."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        gate_up = rows_contiguous(gate_up)
        block = min(power_of_2(size), _MAX_BLOCK)
        _silu_mul_kernel[tokens, cdiv(size, block)](out, gate_up, gate_up.stride(0), SIZE=size, BLOCK=block)
    return out


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """`sigmoid(gate) * x`, `[T, size]`, contiguous, of gates `[T, size]` or `[T, 1]`; computed in float32."""
    tokens, size = x.shape
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    if out.numel():
        gate, x = rows_contiguous(gate), rows_contiguous(x)
        block = min(power_of_2(size), _MAX_BLOCK)
        _sigmoid_mul_kernel[tokens, cdiv(size, block)](
            out, gate, gate.stride(0), x, x.stride(0), SIZE=size, ONE_GATE=gate.shape[1] == 1, BLOCK=block
        )
    return out
