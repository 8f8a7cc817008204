"""Decay and strength of writing of all tokens and heads in one launch.

g = rate softplus(a + bias)         beta = sigmoid(b)
"""

import torch
import triton.language as tl
from torch import Tensor

from ubatch.kernels import rows_contiguous
from ubatch.kernels.triton_jit import cdiv, jit

_BLOCK = 256


@jit("a", "b", "size")
def _gates_kernel(
    a: tl.tensor,
    a_stride: tl.tensor,
    b: tl.tensor,
    b_stride: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    token, head = place // HEADS, place % HEADS
    x = tl.load(a + token * a_stride + head, mask=inside, other=0).to(tl.float32)
    x += tl.load(bias + head, mask=inside, other=0)
    # softplus, exact for very negative x, too: log(1 + y) loses a small y, and the quotient gives it back.
    y = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + y
    small = tl.where(more == 1.0, y, tl.log(more) * (y / tl.where(more == 1.0, 1.0, more - 1.0)))
    decay = tl.load(rate + head, mask=inside, other=0) * tl.where(x > 20.0, x, small)
    strength = tl.sigmoid(tl.load(b + token * b_stride + head, mask=inside, other=0).to(tl.float32))
    row = out + token * (2 * HEADS) + head
    tl.store(row, decay, mask=inside)
    tl.store(row + HEADS, strength, mask=inside)


def delta_gates(a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """`g` and `beta`, `[T, heads]` float32 each, side by side in memory.

    Args:
        a, b: `[T, heads]`; rows may be strided.
        rate, bias: `[heads]` float32.
    """
    a, b = rows_contiguous(a), rows_contiguous(b)
    heads = a.shape[1]
    out = torch.empty(a.shape[0], 2 * heads, dtype=torch.float32, device=a.device)
    if size := a.numel():
        _gates_kernel[cdiv(size, _BLOCK),](
            a, a.stride(0), b, b.stride(0), rate, bias, out, size, HEADS=heads, BLOCK=_BLOCK
        )
    g, beta = out.split(heads, dim=-1)
    return g, beta
