"""Pads requests of different lengths to a rectangle, for kernels that take one, and reverses it.

    ragged    [T, heads, head_dim]                      request r owns the rows query_start_loc[r] to [r + 1]
    padded    [R, max_query_len, heads, head_dim]       request r's rows first, then zeros

A row may have any shape; attention's rows are `[heads, head_dim]`.
"""

import triton.language as tl
from torch import Tensor

from ubatch.kernels import rows_contiguous
from ubatch.kernels.triton_jit import cdiv, jit, power_of_2

_MAX_BLOCK = 1024  # most elements that one program moves


@jit("query_start_loc", "max_query_len")
def _pad_kernel(
    target: tl.tensor,
    source: tl.tensor,
    ragged_stride: tl.tensor,
    query_start_loc: tl.tensor,
    max_query_len: tl.tensor,
    ROW: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    query, request = tl.program_id(0), tl.program_id(1)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    start, stop = tl.load(query_start_loc + request), tl.load(query_start_loc + request + 1)
    token = (start + query).to(tl.int64)
    filled = place < tl.where(token < stop, ROW, 0)
    in_ragged = token * ragged_stride + place
    in_padded = (request.to(tl.int64) * max_query_len + query) * ROW + place
    if PAD:
        tl.store(target + in_padded, tl.load(source + in_ragged, mask=filled, other=0), mask=place < ROW)
    else:
        tl.store(target + in_ragged, tl.load(source + in_padded, mask=filled, other=0), mask=filled)


def _launch(target: Tensor, source: Tensor, ragged: Tensor, query_start_loc: Tensor, most: int, *, pad: bool) -> None:
    """Copy the rows `[T, row]` of `ragged` to a rectangle, or back."""
    row = ragged.shape[1]
    block = min(power_of_2(row), _MAX_BLOCK)
    grid = (most, query_start_loc.shape[0] - 1, cdiv(row, block))
    _pad_kernel[grid](target, source, ragged.stride(0), query_start_loc, most, ROW=row, PAD=pad, BLOCK=block)


def pad_ragged(x: Tensor, query_start_loc: Tensor, max_query_len: int) -> Tensor:
    """Pad every request to `max_query_len` rows.

    Args:
        x: `[T, ...]`.
        query_start_loc: `[R + 1]` int32; no request has more than `max_query_len` tokens.
        max_query_len: tokens of a padded request.

    Returns:
        `[R, max_query_len, ...]`, contiguous; rows past a request's tokens are 0.
    """
    out = x.new_empty(query_start_loc.shape[0] - 1, max_query_len, *x.shape[1:])
    if out.numel():
        flat = rows_contiguous(x.reshape(x.shape[0], -1))
        _launch(out, flat, flat, query_start_loc, max_query_len, pad=True)
    return out


def unpad_ragged(padded: Tensor, query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """The inverse of `pad_ragged`.

    Args:
        padded: `[R, max_query_len, ...]`.
        query_start_loc: `[R + 1]` int32.
        num_tokens: rows of the result; rows that belong to no request are padding.

    Returns:
        `[num_tokens, ...]`, contiguous; rows of padding are 0.
    """
    out = padded.new_zeros(num_tokens, *padded.shape[2:])
    if padded.numel() and num_tokens:
        _launch(out, padded.contiguous(), out.view(num_tokens, -1), query_start_loc, padded.shape[1], pad=False)
    return out
