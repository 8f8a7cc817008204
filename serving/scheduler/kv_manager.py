"""KV memory of requests: free blocks, their rows, and the prefix cache between the two.

    admit           lock what the prefix cache has, take blocks for the rest, evicting where needed
    reserve         blocks for what comes next; `reserve_block_each` for a batch at once
    cache_written   give whole pages that are *written* to the prefix cache; where it has them already, use its blocks
    release         the same, then everything goes back

Every block is free, or the prefix cache's, or in the row of exactly one request and not yet shared. `check` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from attention import BlockAllocator, KVCacheError, KVCacheExhausted, RequestToTokenTable
from serving.scheduler.radix_cache import PrefixMatch, RadixCache
from serving.scheduler.request import TrackedRequest

__all__ = ["KVManager"]


class KVManager:
    """See the module.

    Args:
        allocator: of the runner's KV cache.
        table: the runner's.
        prefix_caching: keep what requests wrote for others that begin alike.
    """

    def __init__(self, allocator: BlockAllocator, table: RequestToTokenTable, *, prefix_caching: bool = True) -> None:
        self._allocator = allocator
        self._table = table
        self._tree = RadixCache(table.block_size)
        self._prefix_caching = prefix_caching
        self.block_size = table.block_size

    @property
    def num_available(self) -> int:
        """Blocks that are free or can be evicted."""
        return self._allocator.num_free + self._tree.num_evictable

    @property
    def num_free_rows(self) -> int:
        """Requests that the table still has room for."""
        return self._table.num_free_rows

    @property
    def max_tokens(self) -> int:
        """Tokens of one request that has the cache to itself: what its row and all blocks hold."""
        return min(self._table.max_blocks, self._allocator.num_blocks) * self.block_size

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1 - self.num_available / self._allocator.num_blocks

    @property
    def prefix_caching(self) -> bool:
        """Whether anything is kept."""
        return self._prefix_caching

    @property
    def tree(self) -> RadixCache:
        """The prefix cache; empty where there is none."""
        return self._tree

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def lookup(self, request: TrackedRequest) -> PrefixMatch:
        """What the prefix cache has of a request: whole pages, and never its last token, which must be computed.

        A request that wants its prompt's log-probabilities gets nothing: they come out of computing the prompt.
        """
        pages = (len(request.token_ids) - 1) // self.block_size
        if not self._prefix_caching or pages == 0 or request.params.prompt_logprobs is not None:
            return PrefixMatch(self._tree.root, ())
        return self._tree.match(request.token_ids, pages * self.block_size)

    def num_available_beside(self, match: PrefixMatch) -> int:
        """Blocks that would be free or evictable, were this match locked."""
        return self.num_available - self._tree.num_unlocked(match.node)

    def admit(self, request: TrackedRequest, match: PrefixMatch, num_tokens: int) -> None:
        """Give a request a row, the blocks of its match and others up to `num_tokens` tokens in all.

        Raises:
            KVCacheExhausted: there is no row, or there are not enough blocks; nothing is taken then.
        """
        needed = self.blocks_for(num_tokens)
        if needed > self._table.max_blocks:
            raise KVCacheExhausted(
                f"request {request.request_id!r} needs {needed} KV blocks; its row holds {self._table.max_blocks}."
            )
        self._tree.lock(match.node)
        try:
            blocks = self._allocate(needed - len(match.blocks))
        except KVCacheExhausted:
            self._tree.unlock(match.node)
            raise
        try:
            row = self._table.add_row()
        except KVCacheExhausted:
            self._allocator.free(blocks)
            self._tree.unlock(match.node)
            raise
        self._table.append(row, [*match.blocks, *blocks])
        request.row, request.node, request.num_kv_blocks = row, match.node, needed
        cached = len(match.blocks) * self.block_size
        request.num_computed_tokens = request.num_written_tokens = request.num_shared_tokens = cached

    def reserve(self, request: TrackedRequest, num_tokens: int) -> None:
        """Give an admitted request blocks for `num_tokens` tokens in all; what it has stays.

        Raises:
            KVCacheExhausted: there are not enough blocks; nothing is taken then.
        """
        more = self.blocks_for(num_tokens) - request.num_kv_blocks
        if more > 0:
            if request.num_kv_blocks + more > self._table.max_blocks:
                raise KVCacheExhausted(
                    f"request {request.request_id!r} needs KV for {num_tokens} tokens; its row holds "
                    f"{self._table.max_blocks * self.block_size}."
                )
            self._table.append(self._row(request), self._allocate(more))
            request.num_kv_blocks += more

    def reserve_block_each(self, requests: Sequence[TrackedRequest]) -> None:
        """Give each of several admitted requests one more block: what `reserve` does at the end of a page.

        Raises:
            KVCacheExhausted: there are not enough blocks; nothing is taken then.
        """
        if not requests:
            return
        rows = [self._row(request) for request in requests]
        blocks = self._allocate(len(requests))
        try:
            self._table.append_each(rows, blocks)
        except KVCacheExhausted:
            self._allocator.free(blocks)
            raise
        for request in requests:
            request.num_kv_blocks += 1

    def cache_written(self, request: TrackedRequest) -> None:
        """Share the pages that the request has filled by now."""
        pages = request.num_written_tokens // self.block_size
        known = request.num_shared_tokens // self.block_size
        if not self._prefix_caching or pages <= known or request.node is None:
            return
        row = self._row(request)
        inserted = self._tree.insert(request.token_ids[: pages * self.block_size], self._table.blocks(row)[:pages])
        if inserted.duplicates:
            self._table.replace(row, known, inserted.blocks[known:])
            self._allocator.free(inserted.duplicates)
        self._tree.lock(inserted.node)
        self._tree.unlock(request.node)
        request.node = inserted.node
        request.num_shared_tokens = pages * self.block_size

    def release(self, request: TrackedRequest, *, keep: bool = True) -> None:
        """Take a request's row and blocks back; the pages that it has written stay in the prefix cache, unlocked.

        A page that a step in flight still writes is not among them. It may be given out at once: steps run in order.

        Args:
            request: that ends, or waits again.
            keep: whether what it has written since `cache_written` goes into the prefix cache.
        """
        if keep:
            self.cache_written(request)
        blocks = self._table.remove_row(self._row(request))
        self._allocator.free(blocks[request.num_shared_tokens // self.block_size :])
        if request.node is not None:
            self._tree.unlock(request.node)
        request.row, request.node, request.num_kv_blocks = None, None, 0
        request.num_computed_tokens = request.num_written_tokens = request.num_shared_tokens = 0

    def check(self, requests: Iterable[TrackedRequest], *, idle: bool = False) -> None:
        """The conservation law: free + cached + held by `requests` alone == total, and nobody shares unknowingly.

        Args:
            requests: all that have a row.
            idle: also require that nothing is locked.

        Raises:
            KVCacheError: it does not hold.
        """
        self._allocator.check()
        self._tree.check()
        cached = set(self._tree.blocks())
        own: Counter[int] = Counter()
        for request in requests:
            blocks = self._table.blocks(self._row(request))
            shared = request.num_shared_tokens // self.block_size
            if len(blocks) != request.num_kv_blocks or not cached.issuperset(blocks[:shared]):
                raise KVCacheError(f"request {request.request_id!r} shares blocks that the prefix cache does not have.")
            own.update(blocks[shared:])
        twice = [block for block, times in own.items() if times > 1 or block in cached]
        if twice:
            raise KVCacheError(f"KV block {twice[0]} has two owners.")
        if len(own) + len(cached) + self._allocator.num_free != self._allocator.num_blocks:
            raise KVCacheError(
                f"KV blocks are not conserved: {self._allocator.num_free} free + {len(cached)} cached + {len(own)} of "
                f"requests != {self._allocator.num_blocks}."
            )
        if idle and (own or self._tree.num_locked):
            raise KVCacheError(
                f"{len(own)} KV blocks are held and {self._tree.num_locked} locked although nothing runs."
            )

    def _allocate(self, count: int) -> list[int]:
        """Take blocks, evicting what is missing."""
        missing = count - self._allocator.num_free
        if 0 < missing <= self._tree.num_evictable:
            self._allocator.free(self._tree.evict(missing))
        return self._allocator.allocate(count)

    def _row(self, request: TrackedRequest) -> int:
        if request.row is None:
            raise KVCacheError(f"request {request.request_id!r} has no row in the block table; admit it first.")
        return request.row
