"""Copies a batch into the static tensors of a captured graph, in one launch; see `attention.graph_buffers`.

programs 0 to R - 1      one request each: its length, its end, its row of the block table
programs R and on        one block of the slot mapping each
"""

import triton.language as tl
from torch import Tensor

from ubatch.kernels.triton_jit import cdiv, jit, power_of_2

_MAX_BLOCK = 1024  # most elements that one program moves


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
        starts,
        lens,
        table,
        table.stride(0),
        table.shape[1],
        slots,
        slots.shape[0],
        num_real,
        num_actual_tokens,
        num_reqs,
        num_tokens,
        max_blocks,
        hidden_slot,
        SEQ_LEN_FILL=seq_len_fill,
        PAGE=block_size,
        BLOCK=block,
    )
