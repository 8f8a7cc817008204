"""A step's requests with one new token, as the kernels in C read them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from attention.kv_cache import CacheSpec, KVCacheError
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError
from ubatch.kernels.c_jit import compile_c, why_not_c

__all__ = ["CHUNK_KEYS", "Decodes", "check_usable", "load_library"]

CHUNK_KEYS = 256
"""Keys per work item; a request that sees more keys is merged from several items."""
_DTYPES = (torch.float32, torch.bfloat16)
_ANY_LENGTH = 2**31 - 1


def check_usable(spec: CacheSpec) -> None:
    """Check that kernels in C can be compiled here and read this cache.

    Raises:
        ConfigError: they cannot; the message says why.
    """
    if spec.dtype not in _DTYPES:
        raise ConfigError(
            f"attention back end 'native' reads caches of float32 or bfloat16, not {spec.dtype}. Choose 'torch'."
        )
    reason = why_not_c()
    if reason is not None:
        raise ConfigError(f"attention back end 'native' needs kernels in C. {reason} Or choose 'torch'.")


def load_library(dtype: torch.dtype, *sources: str, **defines: int) -> ctypes.CDLL:
    """Compile and load files of this folder, for a cache of `dtype`."""
    folder = Path(__file__).parent
    source = "".join((folder / name).read_text(encoding="utf-8") for name in sources)
    return compile_c(source, CHUNK=CHUNK_KEYS, BFLOAT16=int(dtype is torch.bfloat16), **defines)


class _Plan(ctypes.Structure):
    """The C struct `Plan` of pages.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("block_size", "num_blocks", "window")),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("num_requests", "num_rows", "table_stride")),
        *((name, ctypes.c_void_p) for name in ("lengths", "table", "slots", "rows", "items", "merges")),
        *((name, ctypes.c_int64) for name in ("num_items", "num_parts", "num_keys")),
    ]


class Decodes:
    """Requests with one new token each, divided into work items for all layers.

    Args:
        heads: query heads, key/value heads, numbers of a key, numbers of a value.
        scale, soft_cap, window: as in `AttentionShape`.
        spec, num_blocks: of the cache.
        slots: `[T]` int64 from `write_slots`, the rows that a kernel stores; None if it stores none.
        requests: their places in the batch.

    Attributes:
        address: of the C struct `Plan`, for the kernels.
        num_parts: results that are merged; a kernel needs memory for them.
        rows: of the step, one per request.

    Raises:
        KVCacheError: a request's block table, or a slot, names a block that the cache does not have.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        heads: tuple[int, int, int, int],
        scale: float,
        soft_cap: float | None,
        window: int | None,
        spec: CacheSpec,
        num_blocks: int,
        metadata: CommonAttentionMetadata,
        requests: Sequence[int],
        slots: Tensor | None,
    ) -> None:
        every = len(requests) == metadata.num_reqs
        own = metadata.seq_lens_cpu if every else [metadata.seq_lens_cpu[index] for index in requests]
        starts = metadata.query_start_loc_cpu
        lengths = array("i", own)
        rows = array("q", starts[:-1] if every else [starts[index] for index in requests])
        table = _tables(requests, metadata, spec.blocks_for(max(own)))
        window = _ANY_LENGTH if window is None else window
        num_items = sum(-(-min(length, window) // CHUNK_KEYS) for length in own)
        items, merges = array("i", bytes(16 * num_items)), array("i", bytes(8 * len(lengths)))
        self.rows = rows
        self._held = (lengths, table, slots, rows, items, merges)  # the kernel has their addresses
        plan = self._plan = _Plan(
            *heads,
            spec.block_size,
            num_blocks,
            window,
            scale,
            soft_cap or 0.0,
            len(lengths),
            0 if slots is None else slots.shape[0],
            table.stride(0),
            lengths.buffer_info()[0],
            table.data_ptr(),
            None if slots is None else slots.data_ptr(),
            rows.buffer_info()[0],
            items.buffer_info()[0],
            merges.buffer_info()[0],
        )
        self.address = ctypes.addressof(plan)
        library.prepare.restype, library.prepare.argtypes = ctypes.c_int64, (ctypes.c_void_p,)
        bad = library.prepare(self.address)
        if bad >= len(lengths):
            raise KVCacheError(
                f"row {bad - len(lengths)} has a slot that is not among the cache's {num_blocks} blocks."
            )
        if bad >= 0:
            raise KVCacheError(
                f"the block table of request {requests[bad]} names a block that is not among the cache's "
                f"{num_blocks}: {table[bad].tolist()}."
            )
        self.num_parts: int = plan.num_parts


def _tables(requests: Sequence[int], metadata: CommonAttentionMetadata, num_blocks: int) -> Tensor:
    """The requests' rows of the block table, `[n, num_blocks]` int32: a copy, because the table's owner changes it.

    Raises:
        KVCacheError: the table has fewer than `num_blocks` columns.
    """
    table = metadata.block_table
    if table.shape[1] < num_blocks:
        raise KVCacheError(f"a request of {num_blocks} blocks has a block table of {table.shape[1]}.")
    table = table[:, :num_blocks]
    if len(requests) < metadata.num_reqs:
        table = table.index_select(0, torch.tensor(requests))
    return table.to(torch.int32, copy=True, memory_format=torch.contiguous_format)
