"""Assigns rows of the request table and KV blocks to requests, and releases them."""

from __future__ import annotations

from attention import BlockAllocator, KVCache, KVCacheExhausted, RequestToTokenTable
from model_runner.step.request import Request


class RequestMemory:
    """The part of a runner that gives requests a row of the request table and KV blocks."""

    request_table: RequestToTokenTable
    allocator: BlockAllocator
    kv_cache: KVCache
    max_model_len: int

    @property
    def free_kv_tokens(self) -> int:
        """Tokens that the free KV blocks hold."""
        return self.allocator.num_free * self.request_table.block_size

    def admit(self, request: Request, num_tokens: int) -> None:
        """Give a request a row of the request table, and KV blocks for its first `num_tokens` tokens.

        Raises:
            KVCacheExhausted: no row or too few blocks are free; nothing is changed.
        """
        blocks_for = self.kv_cache.spec.blocks_for
        needed, longest = blocks_for(num_tokens), blocks_for(self.max_model_len)
        if needed > longest:
            raise KVCacheExhausted(
                f"request {request.request_id!r} needs {needed} KV blocks; {longest} hold the longest sequence "
                f"({self.max_model_len} tokens)."
            )
        blocks = self.allocator.allocate(needed)
        try:
            request.row = self.request_table.add_row()
        except KVCacheExhausted:
            self.allocator.free(blocks)
            raise
        self.request_table.append(request.row, blocks)

    def reserve(self, request: Request, num_tokens: int) -> None:
        """Extend an admitted request's KV blocks to hold its first `num_tokens` tokens.

        Raises:
            KVCacheExhausted: too few blocks are free; nothing is changed.
        """
        if request.row is None:
            self.admit(request, num_tokens)
            return
        more = self.kv_cache.spec.blocks_for(num_tokens) - len(self.request_table.blocks(request.row))
        if more > 0:
            self.request_table.append(request.row, self.allocator.allocate(more))

    def release(self, request: Request) -> None:
        """Release a request's row and KV blocks; if it runs again, its tokens are computed again."""
        if request.row is not None:
            self.allocator.free(self.request_table.remove_row(request.row))
            request.row = None
            request.num_computed_tokens = 0
