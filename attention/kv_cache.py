"""Paged keys and values for multi-head and grouped-query attention.

Three things that know little of each other:

    PagedKVCache     the memory: per layer a pool of blocks, written by slot (`block * block_size + offset`)
    BlockAllocator   which blocks are free
    BlockTable       which blocks a request has, in order: the request-to-token table

A prefix cache sits between the last two: it keeps blocks allocated after a request has left its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ubatch import ConfigError, UBatchError

__all__ = ["BlockAllocator", "BlockTable", "KVCacheError", "KVCacheExhausted", "KVCacheSpec", "PagedKVCache"]


class KVCacheExhausted(UBatchError):
    """There are not enough free KV blocks. Give the cache more blocks, or run fewer or shorter requests at once."""


class KVCacheError(UBatchError):
    """KV bookkeeping was violated: a block freed twice, a block lost, a row that is not in use."""


@dataclass(frozen=True)
class KVCacheSpec:
    """The shape of a KV cache.

    Attributes:
        num_layers: layers with attention.
        num_kv_heads: key/value heads per layer on this rank.
        head_dim: numbers per head.
        block_size: tokens per block.
        dtype: of the stored keys and values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"KV cache: {name} must be at least 1, not {getattr(self, name)}.")

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        numbers = 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return numbers * torch.empty((), dtype=self.dtype).element_size()

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one request take."""
        return -(-num_tokens // self.block_size)

    def blocks_in(self, num_bytes: int) -> int:
        """Blocks that fit in `num_bytes`.

        Raises:
            ConfigError: not even one fits.
        """
        blocks = num_bytes // self.bytes_per_block
        if blocks < 1:
            raise ConfigError(
                f"{num_bytes} bytes of KV memory hold no block of {self.bytes_per_block} bytes; give more memory."
            )
        return blocks


class PagedKVCache:
    """The memory: one pool of keys and one of values per layer, `[num_blocks, block_size, num_kv_heads, head_dim]`.

    One more block than asked for is allocated and hidden: padding is written there. So a write has a fixed shape and
    never asks the device which tokens are padding. All blocks start at zero and stay finite, because attention reads
    masked positions too and 0 * nan is nan.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device | str = "cpu") -> None:
        if num_blocks < 1:
            raise ConfigError(f"KV cache: num_blocks must be at least 1, not {num_blocks}.")
        self.spec = spec
        self.num_blocks = num_blocks
        shape = (spec.num_layers, num_blocks + 1, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self._k = torch.zeros(shape, dtype=spec.dtype, device=device)
        self._v = torch.zeros(shape, dtype=spec.dtype, device=device)
        slots = (spec.num_layers, -1, spec.num_kv_heads, spec.head_dim)
        self._k_slots = tuple(self._k.view(slots).unbind())
        self._v_slots = tuple(self._v.view(slots).unbind())
        self._k_blocks = tuple(self._k[:, :num_blocks].unbind())
        self._v_blocks = tuple(self._v[:, :num_blocks].unbind())

    @property
    def device(self) -> torch.device:
        """Where the pools are."""
        return self._k.device

    @property
    def nbytes(self) -> int:
        """Bytes of both pools, the hidden block included."""
        return self._k.nbytes + self._v.nbytes

    def keys(self, layer: int) -> Tensor:
        """The layer's keys, `[num_blocks, block_size, num_kv_heads, head_dim]`, a view."""
        return self._k_blocks[layer]

    def values(self, layer: int) -> Tensor:
        """The layer's values, `[num_blocks, block_size, num_kv_heads, head_dim]`, a view."""
        return self._v_blocks[layer]

    def write_slots(self, slot_mapping: Tensor) -> Tensor:
        """The slots to give to `write`, `[T]` int64: padding (-1) is sent to the hidden block. Once per step."""
        hidden = self.num_blocks * self.spec.block_size
        return torch.where(slot_mapping < 0, hidden, slot_mapping)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store new keys and values.

        Args:
            layer: which layer.
            k: `[T, num_kv_heads, head_dim]`.
            v: the same shape.
            slots: `[T]` int64 from `write_slots`; each real slot at most once.
        """
        self._k_slots[layer].index_copy_(0, slots, k)
        self._v_slots[layer].index_copy_(0, slots, v)


class BlockAllocator:
    """Which of `num_blocks` blocks are free. Blocks come back in any order; the last freed is given out first."""

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
        """Blocks that somebody holds."""
        return len(self._used)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks.

        Raises:
            KVCacheExhausted: fewer are free; none is taken then.
        """
        if count > len(self._free):
            raise KVCacheExhausted(
                f"{count} KV blocks needed, {len(self._free)} of {self.num_blocks} free; give the cache more blocks "
                f"(num_kv_blocks or kv_cache_memory), or run fewer or shorter requests at once."
            )
        if count <= 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        self._used.update(taken)
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back.

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
        """The conservation law: free + used == total, and no block is both.

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


class BlockTable:
    """Which blocks each running request has: rows of a `[max_num_reqs, max_blocks]` int32 table on the host.

    A row is a request's for as long as it runs. Entries past its blocks are 0, a block that exists.
    """

    def __init__(self, max_num_reqs: int, max_blocks: int) -> None:
        if max_num_reqs < 1 or max_blocks < 1:
            raise ConfigError(f"block table: {max_num_reqs} rows of {max_blocks} blocks; both must be at least 1.")
        self.max_blocks = max_blocks
        self._table = torch.zeros(max_num_reqs, max_blocks, dtype=torch.int32)
        self._blocks: dict[int, list[int]] = {}
        self._free_rows = list(range(max_num_reqs - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        """Requests that can still be added."""
        return len(self._free_rows)

    def add_row(self) -> int:
        """A row for a new request.

        Raises:
            KVCacheExhausted: every row is in use.
        """
        if not self._free_rows:
            raise KVCacheExhausted(
                f"all {self._table.shape[0]} rows of the block table are in use; run fewer requests at once."
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
        if blocks:
            self._table[row, len(held) : len(held) + len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            held.extend(blocks)

    def blocks(self, row: int) -> tuple[int, ...]:
        """The row's blocks, in token order."""
        return tuple(self._held(row))

    def remove_row(self, row: int) -> list[int]:
        """Release a row; its blocks are the caller's to free or to keep."""
        held = self._held(row)
        del self._blocks[row]
        self._table[row, : len(held)] = 0
        self._free_rows.append(row)
        return held

    def gather(self, rows: Sequence[int]) -> Tensor:
        """The table of a batch, `[len(rows), widest]` int32, a copy: rows may change while the step runs."""
        widest = max((len(self._held(row)) for row in rows), default=0)
        return self._table[:, :widest].index_select(0, torch.tensor(rows, dtype=torch.int64))

    def _held(self, row: int) -> list[int]:
        if row not in self._blocks:
            raise KVCacheError(f"row {row} of the block table is not in use.")
        return self._blocks[row]
