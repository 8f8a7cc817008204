"""A batch's description in the layout that a kernel or a captured graph takes, each in one launch.

fill     copies a batch into the static tensors of a captured graph; see `attention.graph_buffers`
             programs 0 to R - 1      one request each: its length, its end, its row of the block table
             programs R and on        one block of the slot mapping each
pages    lists the pages of the requests one after the other, as flashinfer takes them. The reference is in
         `attention.backends.flashinfer.pages`. So the host computes no offsets, and nothing is copied to the device
             program (r, part)        a block of request r's pages; it counts the pages of the requests before r itself
ragged   pads requests of different lengths to a rectangle, for kernels that take one, and reverses it. A row may have
         any shape; attention's rows are `[heads, head_dim]`
             ragged    [T, heads, head_dim]                      request r owns the rows query_start_loc[r] to [r + 1]
             padded    [R, max_query_len, heads, head_dim]       request r's rows first, then zeros
"""

import triton.language as tl
from torch import Tensor

from ubatch.kernels import rows_contiguous
from ubatch.kernels.triton_jit import cdiv, jit, power_of_2

_MAX_BLOCK = 1024  # most elements, or pages, that one program moves


@jit(
    "query_start_loc",
    "seq_lens",
    "table",
    "table_stride",
    "num_columns",
    "slots",
    "num_slots",
    "num_real",
    "num_actual_tokens",
    "num_reqs",
    "num_tokens",
)
def _fill_kernel(
    static_starts: tl.tensor,
    static_lens: tl.tensor,
    static_table: tl.tensor,
    static_slots: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    table: tl.tensor,
    table_stride: tl.tensor,
    num_columns: tl.tensor,
    slots: tl.tensor,
    num_slots: tl.tensor,
    num_real: tl.tensor,
    num_actual_tokens: tl.tensor,
    num_reqs: tl.tensor,
    num_tokens: tl.tensor,
    max_blocks: tl.tensor,
    hidden_slot: tl.tensor,
    SEQ_LEN_FILL: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, part = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    if row < num_reqs:
        if row < num_real:
            length, end = tl.load(seq_lens + row), tl.load(query_start_loc + row + 1)
            held = tl.minimum(tl.cdiv(length, PAGE), num_columns)
        else:
            length, end = tl.full((), SEQ_LEN_FILL, tl.int32), num_actual_tokens.to(tl.int32)
            held = tl.full((), 0, tl.int32)
        column = part * BLOCK + place
        owned = column < held
        block = tl.load(table + row.to(tl.int64) * table_stride + column, mask=owned, other=0)
        tl.store(static_table + row.to(tl.int64) * max_blocks + column, block, mask=column < max_blocks)
        if part == 0:
            tl.store(static_lens + row, length)
            tl.store(static_starts + row + 1, end)
            if row == 0:
                tl.store(static_starts, 0)
    elif part == 0:
        token = (row - num_reqs) * BLOCK + place
        slot = tl.load(slots + token, mask=token < num_slots, other=-1)
        tl.store(static_slots + token, tl.where(slot < 0, hidden_slot, slot), mask=token < num_tokens)


def fill_batch(
    static: tuple[Tensor, Tensor, Tensor, Tensor],
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    num_real: int,
    num_actual_tokens: int,
    num_reqs: int,
    num_tokens: int,
    block_size: int,
    seq_len_fill: int,
    hidden_slot: int,
) -> None:
    """Copy a batch, padded, in one launch and without allocating. `GraphBuffers.fill` in torch is its reference.

    Args:
        static: `query_start_loc` `[max_reqs + 1]` int32, `seq_lens` `[max_reqs]` int32, `block_table`
            `[max_reqs, max_blocks]` int32, `slot_mapping` `[max_tokens]` int64: written.
        batch: the same tensors of the batch, on the same device; rows of its table are dense.
        num_real: the batch's requests that are not padding.
        num_actual_tokens: their tokens.
        num_reqs, num_tokens: the sizes after padding.
        seq_len_fill: length of a padding request.
        hidden_slot: the slot that padding is written to.
    """
    starts, lens, table, slots = batch
    max_blocks = static[2].shape[1]
    block = min(power_of_2(max(max_blocks, num_tokens)), _MAX_BLOCK)
    _fill_kernel[num_reqs + cdiv(num_tokens, block), cdiv(max_blocks, block)](
        *static,
        *(starts, lens, table, table.stride(0), table.shape[1], slots, slots.shape[0]),
        *(num_real, num_actual_tokens, num_reqs, num_tokens),
        *(max_blocks, hidden_slot),
        SEQ_LEN_FILL=seq_len_fill,
        PAGE=block_size,
        BLOCK=block,
    )


@jit("indices", "table", "table_stride", "query_start_loc", "seq_lens")
def _list_pages_kernel(
    indices: tl.tensor,
    table: tl.tensor,
    table_stride: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    QUERIES: tl.constexpr,
    PAGE: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    request, part = tl.program_id(0), tl.program_id(1)
    others = tl.arange(0, REQUESTS)
    counted = others <= request
    start = tl.load(query_start_loc + others, mask=counted, other=0)
    new = tl.load(query_start_loc + others + 1, mask=counted, other=0) - start
    length = tl.load(seq_lens + others, mask=counted, other=0)
    length = tl.where(new > 0, length - new + QUERIES, QUERIES) if QUERIES else tl.where(new > 0, length, 0)
    pages = tl.where(counted, (length + PAGE - 1) // PAGE, 0)
    before = tl.sum(tl.where(others < request, pages, 0), 0)
    own = tl.sum(tl.where(others == request, pages, 0), 0)
    place = part * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(table + request.to(tl.int64) * table_stride + place, mask=place < own, other=0)
    tl.store(indices + before + place, page, mask=place < own)


def list_pages(
    indices: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    block_size: int,
    most_pages: int,
    padded_queries: int = 0,
) -> None:
    """Write every request's pages, in order; nothing is allocated.

    Args:
        indices: `[pages of all requests]` int32; written.
        block_table: `[R, blocks]` int32; entries past a request's pages are not read.
        query_start_loc: `[R + 1]` int32.
        seq_lens: `[R]` int32.
        most_pages: the most pages of one request.
        padded_queries: list the pages for this many queries behind each request's prefix; a request without queries
            counts as this many tokens. 0 lists each request's real pages, and none for requests without queries.
    """
    num_reqs = seq_lens.shape[0]
    block = min(power_of_2(most_pages), _MAX_BLOCK)
    table = block_table if block_table.stride(-1) == 1 else block_table.contiguous()
    _list_pages_kernel[num_reqs, cdiv(most_pages, block)](
        *(indices, table, table.stride(0), query_start_loc, seq_lens),
        QUERIES=padded_queries,
        PAGE=block_size,
        REQUESTS=power_of_2(num_reqs),
        BLOCK=block,
    )


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


def _launch_pad(
    target: Tensor, source: Tensor, ragged: Tensor, query_start_loc: Tensor, most: int, *, pad: bool
) -> None:
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
        _launch_pad(out, flat, flat, query_start_loc, max_query_len, pad=True)
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
        _launch_pad(out, padded.contiguous(), out.view(num_tokens, -1), query_start_loc, padded.shape[1], pad=False)
    return out
