"""KV memory of requests: the block allocator, the requests' rows in the block table, and the prefix cache.

    admit           lock the cached prefix, allocate blocks for the rest, evict cached pages if needed
    reserve         allocate blocks for the next tokens; `reserve_block_each` for a batch at once
    cache_written   move *written* whole pages into the prefix cache; if it has them already, use its blocks
    release         the same, then free the other blocks and the row

A model with recurrent states goes on from a snapshot only: what is shared of a prefix ends with one, and a prompt is
cut where one is kept (`checkpoints`). `plan_snapshots` says what a step begins with and keeps, `settle` what becomes of
it.

Every block is free, or owned by the prefix cache, or owned by exactly one request. `check` verifies this.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from attention import BlockAllocator, KVCacheError, KVCacheExhausted, RequestToTokenTable
from model_runner import Step
from serving.scheduler.radix_cache import SNAPSHOT_INTERVAL, SNAPSHOT_WORTH, PrefixMatch, RadixCache
from serving.scheduler.request import TrackedRequest, TrackedShare, shares_of


class KVManager:
    """Allocates, shares and frees the KV blocks of requests.

    Args:
        prefix_caching: keep written pages for requests with the same prefix.
        num_snapshots: of recurrent states, that the prefix cache may keep; 0 for a model without such states.

    Attributes:
        tree: the prefix cache; empty if prefix caching is off.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        table: RequestToTokenTable,
        *,
        prefix_caching: bool = True,
        num_snapshots: int = 0,
    ) -> None:
        self._allocator = allocator
        self._table = table
        self.tree = RadixCache(table.block_size, num_snapshots)
        self.prefix_caching = prefix_caching
        self.block_size = table.block_size

    @property
    def num_available(self) -> int:
        """Blocks that are free or can be evicted."""
        return self._allocator.num_free + self.tree.num_evictable

    @property
    def num_free_rows(self) -> int:
        """Free rows of the block table: one per further request."""
        return self._table.num_free_rows

    @property
    def max_tokens(self) -> int:
        """Most tokens of one request alone in the cache: limited by its row and by the number of blocks."""
        return min(self._table.max_blocks, self._allocator.num_blocks) * self.block_size

    @property
    def usage(self) -> float:
        """Share of the blocks that running requests use, 0 to 1."""
        return 1 - self.num_available / self._allocator.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks needed for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def lookup(self, request: TrackedRequest) -> PrefixMatch:
        """The cached prefix of a request: whole pages, without its last token, which must be computed. For a model with
        recurrent states it ends with a snapshot.

        It is empty for a request with `prompt_logprobs`: these need the whole prompt to be computed.
        """
        pages = (len(request.token_ids) - 1) // self.block_size
        if not self.prefix_caching or pages == 0 or request.params.prompt_logprobs is not None:
            return PrefixMatch(self.tree.root, ())
        match = self.tree.match_with_snapshot if self.tree.snapshots.count else self.tree.match
        return match(request.token_ids, pages * self.block_size)

    def num_available_beside(self, match: PrefixMatch) -> int:
        """Blocks that would be free or evictable if this match were locked."""
        return self.num_available - self.tree.num_unlocked(match.node)

    def admit(self, request: TrackedRequest, match: PrefixMatch, num_tokens: int) -> None:
        """Give a request a row, the blocks of its match, and new blocks up to `num_tokens` tokens in total.

        Raises:
            KVCacheExhausted: no free row, or not enough blocks; nothing is allocated then.
        """
        needed = self.blocks_for(num_tokens)
        if needed > self._table.max_blocks:
            raise KVCacheExhausted(
                f"request {request.request_id!r} needs {needed} KV blocks; its row holds {self._table.max_blocks}."
            )
        self.tree.lock(match.node)
        try:
            blocks = self._allocate(needed - len(match.blocks))
        except KVCacheExhausted:
            self.tree.unlock(match.node)
            raise
        try:
            row = self._table.add_row()
        except KVCacheExhausted:
            self._allocator.free(blocks)
            self.tree.unlock(match.node)
            raise
        self._table.append(row, [*match.blocks, *blocks])
        request.row, request.node, request.num_kv_blocks = row, match.node, needed
        self.tree.snapshots.use(match.node)
        request.snapshot = match.node.snapshot
        cached = request.num_kept_tokens = len(match.blocks) * self.block_size
        request.num_computed_tokens = request.num_written_tokens = request.num_shared_tokens = cached

    def reserve(self, request: TrackedRequest, num_tokens: int) -> None:
        """Give an admitted request more blocks, for `num_tokens` tokens in total."""
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
        """Give each of several admitted requests one more block, as `reserve` does for one request at a page's end."""
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
        """Move the whole pages that the request has written into the prefix cache."""
        pages = request.num_written_tokens // self.block_size
        known = request.num_shared_tokens // self.block_size
        if not self.prefix_caching or pages <= known or request.node is None:
            return
        row = self._row(request)
        inserted = self.tree.insert(request.token_ids[: pages * self.block_size], self._table.blocks(row)[:pages])
        if inserted.duplicates:
            self._table.replace(row, known, inserted.blocks[known:])
            self._allocator.free(inserted.duplicates)
        self.tree.lock(inserted.node)
        self.tree.unlock(request.node)
        request.node = inserted.node
        request.num_shared_tokens = pages * self.block_size

    # -- snapshots ----------------------------------------------------------------------------------------------

    def checkpoints(self, request: TrackedRequest, match: PrefixMatch) -> tuple[int, ...]:
        """Where a prompt is to be cut, in tokens from its begin, because a snapshot there will serve others.

        At its last page border, for requests that go on from it; and where it leaves what the cache has, because that
        two requests begin so far alike says that others may. None if a snapshot would save too little.
        """
        if not self.tree.snapshots.count or not self.prefix_caching:
            return ()
        size, last = self.block_size, len(match.blocks) * self.block_size
        found = []
        for place in (last + match.pages_beyond * size, (len(request.token_ids) - 1) // size * size):
            if place - last >= max(SNAPSHOT_WORTH, size):
                found.append(place)
                last = place
        return tuple(found)

    def plan_snapshots(self, step: Step) -> Step:
        """The same step, with the snapshots that its shares begin with, and those that they keep.

        One is kept at checkpoints, and at page borders when `SNAPSHOT_INTERVAL` tokens came since the last one. Not for
        steps with drafts: nobody knows yet which of their tokens stay.
        """
        if not self.tree.snapshots.count:
            return step
        shares = []
        for share, start in zip(shares_of(step), step.prefix_lens, strict=True):
            request = share.request
            restore, request.snapshot = request.snapshot, None
            keep = self._take_snapshot(request, start + share.num_tokens)
            changed = restore is not None or keep is not None
            shares.append(replace(share, restore=restore, keep=keep) if changed else share)
        return replace(step, shares=tuple(shares))

    def _take_snapshot(self, request: TrackedRequest, end: int) -> int | None:
        due = end in request.checkpoints or end - request.num_kept_tokens >= SNAPSHOT_INTERVAL
        if end % self.block_size or not due:
            return None
        number = self.tree.snapshots.take()
        if number is not None:
            request.num_kept_tokens = end
        return number

    def settle(self, share: TrackedShare, end: int, *, good: bool) -> None:
        """A share's result was processed: the snapshot that it kept, if any, goes to the node that ends there.

        Args:
            end: where the share ended, in tokens from the request's begin.
            good: the step's values are finite, and the request is alive or ended with this step. Else the snapshot
                becomes free.
        """
        request = share.request
        if share.keep is None:
            return
        if good:
            if request.row is not None:
                self.cache_written(request)
            match = self.tree.match(request.token_ids, end)
            if len(match.blocks) * self.block_size == end:
                self.tree.snapshots.give(share.keep, match.node)
                return
        self.tree.snapshots.put_back(share.keep)

    # -- the end ------------------------------------------------------------------------------------------------

    def release(self, request: TrackedRequest, *, keep: bool = True) -> None:
        """Free a request's row and blocks; its written pages stay in the prefix cache, unlocked.

        A page that a step in flight still writes is freed. It can be reused at once, because steps run in order.

        Args:
            keep: whether pages written since the last `cache_written` go into the prefix cache.
        """
        if keep:
            self.cache_written(request)
        blocks = self._table.remove_row(self._row(request))
        self._allocator.free(blocks[request.num_shared_tokens // self.block_size :])
        if request.node is not None:
            self.tree.unlock(request.node)
        request.row, request.node, request.num_kv_blocks = None, None, 0
        request.snapshot, request.checkpoints, request.num_kept_tokens = None, (), 0
        request.num_computed_tokens = request.num_written_tokens = request.num_shared_tokens = 0

    def check(self, requests: Iterable[TrackedRequest], *, idle: bool = False) -> None:
        """Check the conservation laws: free + cached + owned by `requests` == total, and no block has two owners; free
        rows + `requests` == all rows, which are also the slots of recurrent states; and so of snapshots.

        Args:
            idle: also require that nothing is locked, and no snapshot promised.
        """
        self._allocator.check()
        self.tree.check(idle=idle)
        cached = set(self.tree.blocks())
        own: Counter[int] = Counter()
        running = list(requests)
        if self._table.num_free_rows + len(running) != self._table.num_rows:
            raise KVCacheError(
                f"rows are not conserved: {self._table.num_free_rows} free + {len(running)} of requests != "
                f"{self._table.num_rows}."
            )
        for request in running:
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
        if idle and (own or self.tree.num_locked):
            raise KVCacheError(
                f"{len(own)} KV blocks are held and {self.tree.num_locked} locked although nothing runs."
            )

    def _allocate(self, count: int) -> list[int]:
        """Allocate blocks; evict cached ones if too few are free."""
        missing = count - self._allocator.num_free
        if 0 < missing <= self.tree.num_evictable:
            self._allocator.free(self.tree.evict(missing))
        return self._allocator.allocate(count)

    def _row(self, request: TrackedRequest) -> int:
        if request.row is None:
            raise KVCacheError(f"request {request.request_id!r} has no row in the block table; admit it first.")
        return request.row
