"""Rotary embedding of queries and keys, in place in the fused projection's output, after their norm if they have one.

    [T, heads, head_dim]    the query heads, then the key heads: a view of the fused projection's output
    norm                    each head separately, times its own weights (Qwen3)
    rotate                  dimension i with i + rotary_dim / 2, by the token's angles; the others only get the norm

One program processes some heads of a token in float32: two halves of each, and what is not rotated. The torch reference
is in `model_runner.decoder.ops`.

Source: Su et al., RoFormer, 2021; the norm: Qwen3 Technical Report, 2025.
"""

import triton.language as tl
from torch import Tensor

from ubatch import ConfigError
from ubatch.kernels.triton_jit import cdiv, jit, power_of_2

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
