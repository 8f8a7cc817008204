"""Operations between a layer's matrix products; the torch references are in `model_runner.decoder.ops`.

Root-mean-square norms, alone or fused with the addition to the residual before them; a program holds a row, in float32:

    norm        y = x / sqrt(mean(x ** 2) + eps) * weight
    add norm    residual = residual + x, rounded to its dtype; then the norm of that

Rotary embedding of queries and keys, in place in the fused projection's output, after their norm if they have one. A
program processes some heads of a token in float32: two halves of each, and what is not rotated:

    [T, heads, head_dim]    the query heads, then the key heads: a view of the fused projection's output
    norm                    each head separately, times its own weights (Qwen3)
    rotate                  dimension i with i + rotary_dim / 2, by the token's angles; the others only get the norm

A gated MLP's activation, on the fused output of its first product (gates, then ups); and a gate on an output.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; Su et al., RoFormer, 2021; the heads' norm:
Qwen3 Technical Report, 2025.
"""

import torch
import triton.language as tl
from torch import Tensor

from ubatch import ConfigError
from ubatch.kernels import rows_contiguous
from ubatch.kernels.triton_jit import INTERPRETED, cdiv, jit, power_of_2


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
    _launch_norm(out, None, rows, None, weight, eps)
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
    _launch_norm(out, summed, rows, residual_rows, weight, eps)
    return out, summed


def _launch_norm(
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


_MAX_TILE = 2048  # elements of a half per program


@jit()
def _rotate_kernel(
    heads: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    angle_stride: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < HALF
    inside = (head < NUM_HEADS)[:, None] & is_dim[None, :]
    first = heads + token * stride_token + head[:, None] * stride_head + dim[None, :]
    a = tl.load(first, mask=inside, other=0).to(tl.float32)
    b = tl.load(first + HALF, mask=inside, other=0).to(tl.float32)
    if HAS_NORM:
        place = 2 * HALF + tl.arange(0, BLOCK_R)  # not rotated; in most families there are none
        in_rest = (head < NUM_HEADS)[:, None] & (place < 2 * HALF + REST)[None, :]
        rest = heads + token * stride_token + head[:, None] * stride_head + place[None, :]
        c = tl.load(rest, mask=in_rest, other=0).to(tl.float32)
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        factor = tl.rsqrt(squares / (2 * HALF + REST) + eps)[:, None]
        of_rest = weight + head[:, None] * (2 * HALF + REST) + place[None, :]
        tl.store(rest, c * factor * tl.load(of_rest, mask=in_rest, other=0).to(tl.float32), mask=in_rest)
        weights = weight + head[:, None] * (2 * HALF + REST) + dim[None, :]
        a = a * factor * tl.load(weights, mask=inside, other=0).to(tl.float32)
        b = b * factor * tl.load(weights + HALF, mask=inside, other=0).to(tl.float32)
    angle = token * angle_stride + dim
    cos_a = tl.load(cos + angle, mask=is_dim, other=0).to(tl.float32)[None, :]
    cos_b = tl.load(cos + angle + HALF, mask=is_dim, other=0).to(tl.float32)[None, :]
    sin_a = tl.load(sin + angle, mask=is_dim, other=0).to(tl.float32)[None, :]
    sin_b = tl.load(sin + angle + HALF, mask=is_dim, other=0).to(tl.float32)[None, :]
    tl.store(first, a * cos_a + b * sin_a, mask=inside)
    tl.store(first + HALF, b * cos_b + a * sin_b, mask=inside)


def rotate_heads(
    heads: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None = None, eps: float | None = None
) -> None:
    """Normalise, if there are weights, and rotate the heads of every token, in place.

    Args:
        heads: `[T, heads, head_dim]`, floating point, dense in the last dimension; usually a slice of a fused
            projection.
        cos: `[T, 1, rotary_dim]`, dense; cosines of each token's angles. The first `rotary_dim` dimensions are rotated.
        sin: the sines, same shape; negative in the first half. See `Rotation`.
        weight: `[heads, head_dim]`, dense, norm weights of each head; None for heads that are not normalised.

    Raises:
        ConfigError: `head_dim` is not dense, `rotary_dim` is odd or larger, or only one of weight and eps is given.
    """
    tokens, num_heads, head_dim = heads.shape
    rotary_dim = cos.shape[-1]
    if rotary_dim % 2 or rotary_dim > head_dim or heads.stride(2) != 1:
        raise ConfigError(
            f"{rotary_dim} dimensions of heads {list(heads.shape)} of strides {heads.stride()} cannot be rotated in "
            "place: their number must be even and at most head_dim, and head_dim must be dense."
        )
    if (weight is None) != (eps is None):
        raise ConfigError("heads are normalised with weights and eps, or not at all; one of the two is missing.")
    if not tokens:
        return
    half, rest = rotary_dim // 2, head_dim - rotary_dim
    block_d, block_r = power_of_2(half), power_of_2(max(1, rest))
    block_h = min(power_of_2(num_heads), max(1, _MAX_TILE // max(block_d, block_r)))
    inputs = heads, heads.stride(0), heads.stride(1), cos, sin, cos.stride(0), weight, eps
    sizes = {"NUM_HEADS": num_heads, "HALF": half, "REST": rest, "HAS_NORM": weight is not None}
    blocks = {"BLOCK_H": block_h, "BLOCK_D": block_d, "BLOCK_R": block_r}
    _rotate_kernel[tokens, cdiv(num_heads, block_h)](*inputs, **sizes, **blocks, num_warps=4)


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
