"""Which requests of a batch read keys and values that others of the same batch write.

Two requests with a common prefix may share its blocks while one of them still computes it. In an unsplit batch that is
safe: every layer writes all keys and values before it attends. In lanes it is safe only if the writer is in the
reader's lane or in an earlier one, because lanes run each layer in lane order:

    writer before the reader in the batch    safe, wherever the cut is
    writer behind the reader                 both must be in one lane: the cut moves, or the batch is not split

A request that straddles a cut reads in the later lane the KV that it wrote in the earlier one: safe by the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reads_of_later_writes(
    query_lens: Sequence[int], seq_lens: Sequence[int], page_table: Tensor, block_size: int
) -> tuple[tuple[int, int], ...]:
    """Pairs (reader, writer) of requests where the writer is behind the reader in the batch, sorted, each pair once.

    Conservative: a block counts as read and as written as a whole.

    Args:
        query_lens: tokens of each request in this step.
        seq_lens: each request's total tokens, those of this step included.
        page_table: `[R, max_blocks]` on the host, each request's blocks.
        block_size: tokens per block.
    """
    if page_table.shape[0] < 2 or not page_table.shape[1]:
        return ()
    lens = torch.tensor((query_lens, seq_lens), dtype=torch.int64)
    prefix = (lens[1] - lens[0]).where(lens[0] > 0, 0)  # without new tokens a request reads and writes nothing
    # A decode step writes few of the many blocks: list them, then look every entry of the table up in one pass.
    first = prefix // block_size
    owner, place = _ragged(((lens[1] + block_size - 1) // block_size - first).where(lens[0] > 0, 0))
    written = page_table[owner, first[owner] + place].long()
    read_end = (prefix + block_size - 1) // block_size
    table = page_table[:, : int(read_end.max())].clamp_min(0)
    if not table.shape[1] or not written.shape[0]:
        return ()
    last_writer = torch.full((max(int(table.max()), int(written.max())) + 1,), -1, dtype=torch.int32)
    # If several requests write a block, keep the last: a reader that runs after the last runs after the others, too.
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
    """For every item of concatenated runs of `counts` items: the index of its run, and its place in the run."""
    owner = torch.repeat_interleave(counts)
    return owner, torch.arange(owner.shape[0]) - (counts.cumsum(0) - counts)[owner]
