"""The gated delta rule for requests with few tokens, a token at a time: `attention.linear.delta_rule`, the reference.

A program has some columns of one head's state of one request, in registers: it is read once, and written once, at the
request's slot. Columns do not depend on each other.
"""

import triton.language as tl
from torch import Tensor

from attention.linear.kernels.records import read_record
from attention.linear.states import GatedDeltaShape
from ubatch.kernels.triton_jit import INTERPRETED, cdiv, jit, power_of_2

_COLUMNS = 16  # of a program: 128 rows of them are 64 registers of each thread in a warp
_NUM_WARPS = 1


@jit()
def _load_unit(rows: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """A head, with length 1; see `normalised`."""
    x = tl.load(rows, mask=inside, other=0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0, keep_dims=True) + 1e-6)


@jit()
def _recur_kernel(
    mixed: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    stride: tl.tensor,
    states: tl.tensor,
    out: tl.tensor,
    kept: tl.tensor,
    records: tl.tensor,
    scale: tl.tensor,
    most: tl.tensor,
    WIDTH: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    KEPT: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    KEEP: tl.constexpr,
    WRITE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, fresh, source, target, count = read_record(records, request, KEPT, NUM_KEPT, WIDTH)
    if (count == 0) | (count > most):
        return
    row, column = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    key_inside, value_inside = row < K_DIM, column < V_DIM
    place = states + (slot * V_HEADS + head) * (K_DIM * V_DIM) + row[:, None] * V_DIM + column[None, :]
    inside = key_inside[:, None] & value_inside[None, :]
    begun = row < tl.where(fresh == 0, K_DIM, 0)
    state = tl.load(place, mask=begun[:, None] & value_inside[None, :], other=0)
    key_head = head // (V_HEADS // K_HEADS)
    DIM: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    for token in range(0, count):
        channels = mixed + (target + token) * DIM
        k = _load_unit(channels + (K_HEADS + key_head) * K_DIM + row, key_inside)
        v = tl.load(channels + 2 * K_HEADS * K_DIM + head * V_DIM + column, mask=value_inside, other=0).to(tl.float32)
        gate = (source + token) * stride + head
        decay, strength = tl.load(g + gate), tl.load(beta + gate)
        state *= tl.exp(decay)
        held = tl.sum(state * k[:, None], 0)
        state += k[:, None] * ((v - held) * strength)[None, :]
        if not KEPT:
            q = _load_unit(channels + key_head * K_DIM + row, key_inside) * scale
            read = tl.sum(state * q[:, None], 0)
            tl.store(out + ((target + token) * V_HEADS + head) * V_DIM + column, read, mask=value_inside)
        if KEEP:
            gates = kept + (slot * NUM_KEPT + token) * (2 * V_HEADS) + head
            if tl.program_id(2) == 0:
                tl.store(gates, decay)
                tl.store(gates + V_HEADS, strength)
    if WRITE:
        tl.store(place, state, mask=inside)


def recur(
    mixed: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    out: Tensor | None,
    records: Tensor,
    shape: GatedDeltaShape,
    *,
    most: int,
    num_kept: int,
    kept: Tensor | None = None,
    write: bool,
) -> None:
    """Run the requests with at most `most` tokens.

    Args:
        mixed: outputs of `convolve`, dense.
        g, beta: `[T, v_heads]` float32, dense in the last dimension, with the same stride; of kept tokens all that the
            layer keeps.
        states: `[slots, v_heads, k_dim, v_dim]` float32, dense.
        out: `[T, v_heads, v_dim]` float32, dense; None runs the accepted ones of the kept tokens, without outputs.
        records: `[R, 6]` int64, see `records`.
        kept: `[slots * num_kept, 2 * v_heads]` float32, dense, which takes every token's gates; None keeps none.
        write: states change.
    """
    rows = power_of_2(shape.k_dim)
    columns = power_of_2(shape.v_dim) if INTERPRETED else min(power_of_2(shape.v_dim), _COLUMNS)
    _recur_kernel[records.shape[0], shape.num_v_heads, cdiv(shape.v_dim, columns)](
        *(mixed, g, beta, g.stride(0), states, out, kept, records, shape.k_dim**-0.5, most),
        WIDTH=records.shape[1],
        K_HEADS=shape.num_k_heads,
        V_HEADS=shape.num_v_heads,
        K_DIM=shape.k_dim,
        V_DIM=shape.v_dim,
        KEPT=out is None,
        NUM_KEPT=num_kept,
        KEEP=kept is not None,
        WRITE=write,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=_NUM_WARPS,
    )
