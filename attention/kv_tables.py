"""Bookkeeping of KV memory: the free blocks, the slots of every running request, and who reads what others write.

    BlockAllocator        which blocks (pages) are free
    RequestToTokenTable   which slot holds each token of each request; the page table is a strided read of it
    reads_of_later_writes which requests of a batch read keys and values that others of the same batch write

A prefix cache sits between the two: it keeps blocks allocated after their request's row was removed.

Two requests with a common prefix may share its blocks while one of them still computes it. In an unsplit batch that is
safe: every layer writes all keys and values before it attends. In lanes it is safe only if the writer is in the
reader's lane or in an earlier one, because lanes run each layer in lane order:

    writer before the reader in the batch    safe, wherever the cut is
    writer behind the reader                 both must be in one lane: the cut moves, or the batch is not split

A request that straddles a cut reads in the later lane the KV that it wrote in the earlier one: safe by the same order.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from attention.kv_cache import KVCacheError, KVCacheExhausted
from ubatch import ConfigError


class BlockAllocator:
    """Which of `num_blocks` blocks are free. Blocks are freed in any order; the last freed is allocated first."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"KV cache: num_blocks must be at least 1, not {num_blocks}.")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that are allocated now."""
        return len(self._used)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks.

        Raises:
            KVCacheExhausted: fewer are free; none is taken then.
        """
        if count > len(self._free):
            raise KVCacheExhausted(
                f"{count} KV blocks needed, {len(self._free)} of {self.num_blocks} free; give the cache more blocks "
                f"(num_kv_blocks, or kv_cache_memory, which is --kv-cache-memory), or run fewer or shorter requests at "
                "once."
            )
        if count <= 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        self._used.update(taken)
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Free blocks.

        Raises:
            KVCacheError: one of them is not in use, or is named twice; none is freed then.
        """
        given = set(blocks)
        stray = sorted(given - self._used)
        if stray or len(given) != len(blocks):
            what = f"block {stray[0]} is not in use" if stray else f"a block is named twice in {list(blocks)}"
            raise KVCacheError(f"cannot free KV blocks: {what}.")
        self._used -= given
        self._free.extend(reversed(blocks))

    def check(self, *, idle: bool = False) -> None:
        """Check that free + used == total, and that no block is both.

        Args:
            idle: also require that nothing is in use.

        Raises:
            KVCacheError: it does not hold.
        """
        free = set(self._free)
        if len(free) != len(self._free) or free & self._used or len(free) + len(self._used) != self.num_blocks:
            raise KVCacheError(
                f"KV blocks are not conserved: {len(self._free)} free ({len(free)} distinct) + {len(self._used)} used, "
                f"{len(free & self._used)} both, != {self.num_blocks}."
            )
        if idle and self._used:
            raise KVCacheError(f"{len(self._used)} KV blocks are still in use although nothing runs.")


class RequestToTokenTable:
    """The slot of every token of every running request: `[max_num_reqs, max_blocks * block_size]` int32 on the host.

    A request keeps its row for as long as it runs. Its tokens fill its blocks in order, so every `block_size`-th entry
    of a row, divided by `block_size`, is a block number: the page table that kernels take is a strided read of this
    table. Entries past a request's blocks are 0, which is a valid slot.
    """

    def __init__(self, max_num_reqs: int, max_blocks: int, block_size: int) -> None:
        if max_num_reqs < 1 or max_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"request-to-token table: {max_num_reqs} rows of {max_blocks} blocks of {block_size} tokens; all three "
                "must be at least 1."
            )
        self.max_blocks = max_blocks
        self.block_size = block_size
        self._slots = torch.zeros(max_num_reqs, max_blocks * block_size, dtype=torch.int32)
        self._offsets = torch.arange(block_size, dtype=torch.int32)
        self._blocks: dict[int, list[int]] = {}
        self._owners = Counter[int]()  # rows that hold a block
        self._free_rows = list(range(max_num_reqs - 1, -1, -1))

    @property
    def num_rows(self) -> int:
        """Requests that the table has room for."""
        return self._slots.shape[0]

    @property
    def num_free_rows(self) -> int:
        """Requests that can still be added."""
        return len(self._free_rows)

    def add_row(self) -> int:
        """Take a row for a new request.

        Raises:
            KVCacheExhausted: every row is in use.
        """
        if not self._free_rows:
            raise KVCacheExhausted(
                f"all {self._slots.shape[0]} rows of the request-to-token table are in use; run fewer requests at once."
            )
        row = self._free_rows.pop()
        self._blocks[row] = []
        return row

    def append(self, row: int, blocks: Sequence[int]) -> None:
        """Give a request more blocks.

        Raises:
            KVCacheError: the row is not in use.
            KVCacheExhausted: the row is too short for them.
        """
        held = self._held(row)
        if len(held) + len(blocks) > self.max_blocks:
            raise KVCacheExhausted(
                f"a request needs {len(held) + len(blocks)} KV blocks, its row holds at most {self.max_blocks}."
            )
        self._write(row, len(held), blocks)
        held.extend(blocks)
        self._owners.update(blocks)

    def append_each(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Give each of several requests one more block: `append` for a whole batch, in one write.

        Raises:
            KVCacheError: a row is not in use.
            KVCacheExhausted: a row is full; then no row gets a block.
        """
        held = [self._held(row) for row in rows]
        if any(len(own) >= self.max_blocks for own in held):
            raise KVCacheExhausted(f"a request needs {self.max_blocks + 1} KV blocks, its row holds {self.max_blocks}.")
        if rows:
            starts = torch.tensor([len(own) * self.block_size for own in held])[:, None]
            self._slots[torch.tensor(rows)[:, None], starts + self._offsets] = self._slots_of(blocks)
        for own, block in zip(held, blocks, strict=True):
            own.append(block)
        self._owners.update(blocks)

    def replace(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """Replace a row's blocks from `start` on by other blocks with the same contents.

        Raises:
            KVCacheError: the row is not in use, or has fewer than `start + len(blocks)` blocks.
        """
        held = self._held(row)
        stop = start + len(blocks)
        if start < 0 or stop > len(held):
            raise KVCacheError(f"cannot replace blocks {start} to {stop} of row {row}: it has {len(held)}.")
        self._write(row, start, blocks)
        self._owners.subtract(held[start:stop])
        self._owners.update(blocks)
        held[start:stop] = blocks

    def blocks(self, row: int) -> tuple[int, ...]:
        """The row's blocks, in token order."""
        return tuple(self._held(row))

    def room(self, rows: Sequence[int]) -> list[int]:
        """Tokens that each row's blocks hold.

        Raises:
            KVCacheError: a row is not in use.
        """
        try:
            return [len(self._blocks[row]) * self.block_size for row in rows]
        except KeyError as error:
            raise KVCacheError(f"row {error.args[0]} of the request-to-token table is not in use.") from None

    def writes_shared(self, rows: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> bool:
        """Whether the tokens from `starts` to `stops` of the rows' requests lie in a block that several rows hold."""
        size, owners = self.block_size, self._owners
        for row, start, stop in zip(rows, starts, stops, strict=True):
            for block in self._blocks[row][start // size : -(-stop // size)]:
                if owners[block] > 1:
                    return True
        return False

    def remove_row(self, row: int) -> list[int]:
        """Release a row and return its blocks, which the caller frees or keeps."""
        held = self._held(row)
        del self._blocks[row]
        self._owners.subtract(held)
        self._slots[row, : len(held) * self.block_size] = 0
        self._free_rows.append(row)
        return held

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The slots of tokens, `[T]` int64.

        Args:
            rows: `[T]` int64, the row of each token's request.
            positions: `[T]` int64, each token's place in its request.
        """
        return self._slots[rows, positions].long()

    def page_table(self, rows: Sequence[int]) -> Tensor:
        """The blocks of a batch, `[len(rows), longest row]` int32, a copy: rows may change while the step runs."""
        first_slots = self._slots[:, : max(self.room(rows), default=0) : self.block_size]
        return first_slots.index_select(0, torch.tensor(rows, dtype=torch.int64)) // self.block_size

    def _write(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """Write the slots of a row's blocks from the `start`-th one on."""
        slots = self._slots_of(blocks).flatten()
        self._slots[row, start * self.block_size :][: slots.numel()] = slots

    def _slots_of(self, blocks: Sequence[int]) -> Tensor:
        """`[blocks, block_size]` int32."""
        return torch.tensor(blocks, dtype=torch.int32)[:, None] * self.block_size + self._offsets

    def _held(self, row: int) -> list[int]:
        if row not in self._blocks:
            raise KVCacheError(f"row {row} of the request-to-token table is not in use.")
        return self._blocks[row]


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
