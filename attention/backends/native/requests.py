"""A step's requests, as the kernels in C read them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from attention.kv_cache import CacheSpec, KVCacheError, MLAKVCache, PagedKVCache
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError
from ubatch.kernels import TILES_SOURCE, compile_c, why_not_c

CHUNK_KEYS = 256
"""Keys per work item; a request that sees more keys is merged from several items."""
_DTYPES = (torch.float32, torch.bfloat16)
_ANY_LENGTH = 2**31 - 1


@dataclass(frozen=True)
class Kernel:
    """The functions of a library in C, and the one for a layer.

    Attributes:
        most_tokens: query tokens that one call takes; 0 for any number.
    """

    functions: ctypes.CDLL
    attention: Callable[..., None]
    most_tokens: int = 0


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
    """Compile and load files of this folder, for a cache of `dtype`, with AMX if the system grants its registers."""
    folder = Path(__file__).parent
    source = TILES_SOURCE.read_text(encoding="utf-8")
    source += "".join((folder / name).read_text(encoding="utf-8") for name in sources)
    defines = {"CHUNK": CHUNK_KEYS, "BFLOAT16": int(dtype is torch.bfloat16), **defines}
    if dtype is not torch.bfloat16:
        defines["TILES"] = 0
    library = compile_c(source, **defines)
    if "TILES" not in defines and not library.grants_tiles():
        library = compile_c(source, **defines, TILES=0)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.prepare.argtypes, library.prepare.restype = (pointer,), number
    library.find_bad_slot.argtypes, library.find_bad_slot.restype = (pointer, number, number), number
    return library


def check_slots(library: ctypes.CDLL, slots: Tensor, kv_cache: PagedKVCache | MLAKVCache) -> int:
    """The number of rows that are stored at `slots`, int64 from `write_slots`.

    Raises:
        KVCacheError: a slot is not in the cache.
    """
    num_rows = slots.shape[0]
    bad = library.find_bad_slot(slots.data_ptr(), num_rows, kv_cache.hidden_slot + kv_cache.spec.block_size)
    if bad >= 0:
        raise KVCacheError(
            f"row {bad} has the slot {slots[bad]}, which is not in the cache of {kv_cache.num_blocks} blocks."
        )
    return num_rows


def checked(needed_by: object, what: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`x`, with the numbers of its last dimension side by side.

    Raises:
        ConfigError: it has another shape or dtype, so that a kernel would read past it.
    """
    if x.shape != shape or x.dtype is not dtype:
        raise ConfigError(f"{needed_by} needs {what} {[*shape]} in the cache's {dtype}, not {[*x.shape]} in {x.dtype}.")
    return x if x.stride(-1) == 1 else x.contiguous()


class _Plan(ctypes.Structure):
    """The C struct `Plan` of pages.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("row", "value_row")),
        *((name, ctypes.c_int64) for name in ("block_size", "num_blocks", "window")),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("num_requests", "table_stride", "item_tokens")),
        *((name, ctypes.c_void_p) for name in ("lengths", "queries", "table", "rows", "items", "merges")),
        *((name, ctypes.c_int64) for name in ("num_items", "num_parts", "num_keys")),
    ]


@dataclass(frozen=True)
class Sizes:
    """A kind of attention, as the kernels need it.

    Attributes:
        head_dim: numbers of a key.
        value_dim: numbers of a value.
        row: numbers of a row of cached keys.
        value_row: numbers of a row of cached values; of latents, the same row.
        scale, soft_cap, window: as in `AttentionShape`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    row: int
    value_row: int
    scale: float
    soft_cap: float | None = None
    window: int | None = None


@dataclass(frozen=True)
class Queries:
    """Some requests of a step; a request's query tokens may be given one by one, as requests of one query each.

    Attributes:
        requests: their places in the batch; at least one.
        lengths: int32, tokens that the last query sees, itself included.
        rows: int64, the first query's row.
    """

    requests: Sequence[int]
    lengths: array[int]
    rows: array[int]

    @classmethod
    def of(cls, metadata: CommonAttentionMetadata, requests: Sequence[int]) -> Queries:
        """All queries of these requests."""
        starts, seq_lens = metadata.query_start_loc_cpu, metadata.seq_lens_cpu
        lengths = array("i", [seq_lens[index] for index in requests])
        return cls(requests, lengths, array("q", [starts[index] for index in requests]))


class Requests:
    """Some requests of a step, divided into work items for all layers.

    Args:
        cache: the cache's spec and number of blocks.
        item_tokens: query tokens of a work item; None if every request has one query token.

    Attributes:
        address: of the C struct `Plan`, for the kernels.
        num_parts: results that are merged; a kernel needs memory for them.

    Raises:
        KVCacheError: a request's block table names a block that the cache does not have.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        sizes: Sizes,
        cache: tuple[CacheSpec, int],
        metadata: CommonAttentionMetadata,
        queries: Queries,
        item_tokens: int | None = None,
    ) -> None:
        spec, num_blocks = cache
        requests, lengths, rows = queries.requests, queries.lengths, queries.rows
        starts = metadata.query_start_loc_cpu
        numbers = array("i", [] if item_tokens is None else [starts[index + 1] - starts[index] for index in requests])
        table = _tables(requests, metadata, spec.blocks_for(max(lengths)))
        window = _ANY_LENGTH if sizes.window is None else sizes.window
        if item_tokens is None:
            num_items = sum([-(-min(length, window) // CHUNK_KEYS) for length in lengths])
        else:
            num_items = sum(-(-number // item_tokens) for number in numbers)
        items, merges = array("i", bytes(16 * num_items)), array("i", bytes(8 * len(lengths)))
        self._held = (lengths, numbers, table, rows, items, merges)  # the kernel has their addresses
        self._plan = plan = _Plan(
            *(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.value_dim, sizes.row, sizes.value_row),
            *(spec.block_size, num_blocks, window),
            *(sizes.scale, sizes.soft_cap or 0.0),
            *(len(lengths), table.stride(0), item_tokens or 1),
            lengths.buffer_info()[0],
            None if item_tokens is None else numbers.buffer_info()[0],
            table.data_ptr(),
            *(rows.buffer_info()[0], items.buffer_info()[0], merges.buffer_info()[0]),
        )
        self.address = ctypes.addressof(plan)
        bad = library.prepare(self.address)
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
    if requests != range(metadata.num_reqs):
        table = table.index_select(0, torch.tensor(requests))
    return table.to(torch.int32, copy=True, memory_format=torch.contiguous_format)
