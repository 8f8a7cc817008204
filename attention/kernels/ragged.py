"""Requests of different lengths, padded to a rectangle for kernels that want one, and back.

    ragged    [T, heads, head_dim]                      request r owns the rows query_start_loc[r] to [r + 1]
    padded    [R, max_query_len, heads, head_dim]       its rows come first, zeros after

A row is anything; heads and their dimension are what attention pads.
"""

import triton.language as tl
from torch import Tensor

from ubatch.kernels.triton_jit import cdiv, jit, power_of_2, rows_contiguous

__all__ = ["pad_ragged", "unpad_ragged"]

_MAX_BLOCK = 1024  # numbers that one program moves


@jit("query_start_loc", "max_query_len")
def _pad_kernel(
    padded: tl.tensor,
    ragged: tl.tensor,
    ragged_stride: tl.tensor,
    query_start_loc: tl.tensor,
    max_query_len: tl.tensor,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    query, request = tl.program_id(0), tl.program_id(1)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    start, stop = tl.load(query_start_loc + request), tl.load(query_start_loc + request + 1)
    token = (start + query).to(tl.int64)
    filled = tl.where(token < stop, ROW, 0)
    row = tl.load(ragged + token * ragged_stride + place, mask=place < filled, other=0)
    target = (request.to(tl.int64) * max_query_len + query) * ROW
    tl.store(padded + target + place, row, mask=place < ROW)


@jit("query_start_loc", "max_query_len")
def _unpad_kernel(
    ragged: tl.tensor,
    padded: tl.tensor,
    query_start_loc: tl.tensor,
    max_query_len: tl.tensor,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    query, request = tl.program_id(0), tl.program_id(1)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    start, stop = tl.load(query_start_loc + request), tl.load(query_start_loc + request + 1)
    token = (start + query).to(tl.int64)
    inside = place < tl.where(token < stop, ROW, 0)
    source = (request.to(tl.int64) * max_query_len + query) * ROW
    row = tl.load(padded + source + place, mask=inside, other=0)
    tl.store(ragged + token * ROW + place, row, mask=inside)


def pad_ragged(x: Tensor, query_start_loc: Tensor, max_query_len: int) -> Tensor:
    """One row of tokens per request, all as long as the longest.

    Args:
        x: `[T, ...]`.
        query_start_loc: `[R + 1]` int32; no request has more than `max_query_len` tokens.
        max_query_len: tokens of a padded request.

    Returns:
        `[R, max_query_len, ...]`, contiguous; rows past a request's tokens are 0.
    """
    num_reqs = query_start_loc.shape[0] - 1
    out = x.new_empty(num_reqs, max_query_len, *x.shape[1:])
    if out.numel():
        flat = rows_contiguous(x.reshape(x.shape[0], -1))
        row = flat.shape[1]
        block = min(power_of_2(row), _MAX_BLOCK)
        _pad_kernel[max_query_len, num_reqs, cdiv(row, block)](
            out, flat, flat.stride(0), query_start_loc, max_query_len, ROW=row, BLOCK=block
        )
    return out


def unpad_ragged(padded: Tensor, query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """The inverse of `pad_ragged`.

    Args:
        padded: `[R, max_query_len, ...]`.
        query_start_loc: `[R + 1]` int32.
        num_tokens: rows of the result; those that no request owns are padding.

    Returns:
        `[num_tokens, ...]`, contiguous; rows of padding are 0.
    """
    out = padded.new_zeros(num_tokens, *padded.shape[2:])
    if padded.numel():
        padded = padded.contiguous()
        num_reqs, max_query_len = padded.shape[:2]
        row = padded[0, 0].numel()
        block = min(power_of_2(row), _MAX_BLOCK)
        _unpad_kernel[max_query_len, num_reqs, cdiv(row, block)](
            out, padded, query_start_loc, max_query_len, ROW=row, BLOCK=block
        )
    return out
