"""Which requests of a batch read keys and values that others of the same batch write.

Two requests with a common prefix may share its blocks while one of them still computes it. Unsplit that is safe: in
every layer all keys and values are written before anything is attended. In lanes it is safe only if the writer's lane
is the reader's, or an earlier one, because lanes pass every layer in their order:

    writer before the reader in the batch    safe, wherever the cut is
    writer behind the reader                 both must be in one lane: the cut moves, or the batch is not split

A request that straddles a cut reads in its later lane what its earlier lane wrote: safe by the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["reads_of_later_writes"]


def reads_of_later_writes(
    query_lens: Sequence[int], seq_lens: Sequence[int], page_table: Tensor, block_size: int
) -> tuple[tuple[int, int], ...]:
    """Pairs (reader, writer) of requests with the writer behind the reader, sorted, each once.

    Conservative: a block counts as read and as written as a whole.

    Args:
        query_lens: tokens of each request in this step.
        seq_lens: its tokens in total, these included.
        page_table: `[R, max_blocks]` on the host, each request's blocks.
        block_size: tokens per block.
    """
    if page_table.shape[0] < 2 or not page_table.shape[1]:
        return ()
    lens = torch.tensor((query_lens, seq_lens), dtype=torch.int64)
    prefix = (lens[1] - lens[0]).where(lens[0] > 0, 0)  # who brings no token reads nothing, and writes nothing
    # A decode step writes few blocks of many: they are listed, and the table is passed over once, to look them up.
    first = prefix // block_size
    owner, place = _ragged(((lens[1] + block_size - 1) // block_size - first).where(lens[0] > 0, 0))
    written = page_table[owner, first[owner] + place].long()
    read_end = (prefix + block_size - 1) // block_size
    table = page_table[:, : int(read_end.max())].clamp_min(0)
    if not table.shape[1] or not written.shape[0]:
        return ()
    last_writer = torch.full((max(int(table.max()), int(written.max())) + 1,), -1, dtype=torch.int32)
    # Of several writers of a block the last one decides: whoever must not run before it must not before the others.
    last_writer.scatter_reduce_(0, written, owner.int(), "amax")
    writer = last_writer.index_select(0, table.flatten()).view(table.shape)
    reader = torch.arange(table.shape[0], dtype=torch.int32)[:, None]
    later = writer > reader
    if not later.any():
        return ()
    later &= torch.arange(table.shape[1]) < read_end[:, None]
    rows, columns = later.nonzero(as_tuple=True)
    return tuple(sorted(set(zip(rows.tolist(), writer[rows, columns].tolist(), strict=True))))


def _ragged(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For every item of concatenated runs of so many: which run it is in, and its place there."""
    owner = torch.repeat_interleave(counts)
    return owner, torch.arange(owner.shape[0]) - (counts.cumsum(0) - counts)[owner]
