"""Assigns rows of the request table and KV blocks to requests, and releases them."""

from __future__ import annotations

from collections.abc import Callable

from attention import BlockAllocator, KVCacheExhausted, RequestToTokenTable
from model_runner.step.request import Request

__all__ = ["RequestMemory"]


class RequestMemory:
    """Gives requests a row of the request table and KV blocks."""

    def __init__(
        self,
        table: RequestToTokenTable,
        allocator: BlockAllocator,
        blocks_for: Callable[[int], int],
        max_model_len: int,
    ) -> None:
        self._table = table
        self._allocator = allocator
        self._blocks_for = blocks_for
        self._max_model_len = max_model_len

    @property
    def free_tokens(self) -> int:
        """Tokens that the free blocks hold."""
        return self._allocator.num_free * self._table.block_size

    def admit(self, request: Request, num_tokens: int) -> None:
        """Give a request a row of the request table, and blocks for its first `num_tokens` tokens.

        Raises:
            KVCacheExhausted: no row or too few blocks are free; nothing is changed.
        """
        needed = self._blocks_for(num_tokens)
        longest = self._blocks_for(self._max_model_len)
        if needed > longest:
            raise KVCacheExhausted(
                f"request {request.request_id!r} needs {needed} KV blocks; {longest} hold the longest sequence "
                f"({self._max_model_len} tokens)."
            )
        blocks = self._allocator.allocate(needed)
        try:
            request.row = self._table.add_row()
        except KVCacheExhausted:
            self._allocator.free(blocks)
            raise
        self._table.append(request.row, blocks)

    def reserve(self, request: Request, num_tokens: int) -> None:
        """Extend an admitted request's blocks to hold its first `num_tokens` tokens.

        Raises:
            KVCacheExhausted: too few blocks are free; nothing is changed.
        """
        if request.row is None:
            self.admit(request, num_tokens)
            return
        held = len(self._table.blocks(request.row))
        more = self._blocks_for(num_tokens) - held
        if more > 0:
            self._table.append(request.row, self._allocator.allocate(more))

    def release(self, request: Request) -> None:
        """Release a request's row and blocks; if it runs again, its tokens are computed again."""
        if request.row is not None:
            self._allocator.free(self._table.remove_row(request.row))
            request.row = None
            request.num_computed_tokens = 0
