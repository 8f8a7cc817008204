"""The `native` back end: the `torch` back end on a CPU, with a C kernel for decodes (`native_decode.c`).

    decode                      one new token: the kernel reads keys and values in place in the cache, once, and
                                computes in float32, also from a bfloat16 cache
    fresh, extend, verify       as in the `torch` back end (`attention.backends.torch.sdpa`)
    latent attention            `torch_mla` runs it, also under this name (`attention.backends.registry`)

A request's decode gives the same bits alone and in any batch, and on any number of threads.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from attention.backends.torch.groups import Request, TokenRows, indices
from attention.backends.torch.sdpa import (
    AttentionGroup,
    AttentionStep,
    TorchAttentionBackend,
    TorchAttentionPlan,
    make_groups,
)
from attention.interface import AttentionShape, BackendTraits
from attention.kv_cache import KVCacheError, PagedKVCache
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError
from ubatch.kernels.c_jit import compile_c, kernel_of, why_not_c

__all__ = ["CHUNK_KEYS", "NativeAttentionBackend"]

CHUNK_KEYS = 256
"""Keys per work item; a request that sees more keys is merged from several items."""
_DTYPES = (torch.float32, torch.bfloat16)


class NativeAttentionBackend(TorchAttentionBackend):
    """Plans decodes in C over a float32 or bfloat16 cache on a CPU, and everything else as `torch`.

    Raises:
        ConfigError: C cannot be compiled here, or the cache has another dtype.
    """

    name: ClassVar[str] = "native"
    traits: ClassVar[BackendTraits] = BackendTraits(
        devices=("cpu",), sliding_window=True, soft_cap=True, sinks=True, tree_mask=True
    )

    def __init__(self, shape: AttentionShape, kv_cache: PagedKVCache) -> None:
        dtype = kv_cache.spec.dtype
        if dtype not in _DTYPES:
            raise ConfigError(
                f"attention back end 'native' reads caches of float32 or bfloat16, not {dtype}. Choose 'torch'."
            )
        reason = why_not_c()
        if reason is not None:
            raise ConfigError(f"attention back end 'native' needs kernels in C. {reason} Or choose 'torch'.")
        _kernel(dtype)
        super().__init__(shape, kv_cache)

    def plan(self, metadata: CommonAttentionMetadata) -> TorchAttentionPlan:
        """Prepare the decodes' work items, and `torch`'s groups for the other requests.

        Raises:
            KVCacheError: a decode's block table names a block that the cache does not have.
        """
        step = AttentionStep(self.shape, self.kv_cache, metadata, self._workspace)
        decodes: list[Request] = []
        others: list[Request] = []
        for request in step.requests:
            (decodes if request.query_len == 1 and not metadata.has_tree else others).append(request)
        groups: list[AttentionGroup] = [_Decodes(step, decodes)] if decodes else []
        return TorchAttentionPlan(step, groups + make_groups(step, others))


class _Plan(ctypes.Structure):
    """The C struct `Plan` of the kernel."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "num_blocks")),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("num_requests", "num_items", "table_stride")),
        *((name, ctypes.c_void_p) for name in ("rows", "table", "items", "merges")),
    ]


class _Decodes:
    """Requests with one new token, as an `AttentionGroup` that the C kernel computes."""

    def __init__(self, step: AttentionStep, requests: Sequence[Request]) -> None:
        shape, spec, metadata = step.shape, step.kv_cache.spec, step.metadata
        self.tokens = TokenRows(requests, metadata.slot_mapping.device)
        items, merges, num_parts = array("i"), array("i"), 0
        for place, request in enumerate(requests):
            first, end = request.first_visible, request.seq_len
            if end - first <= CHUNK_KEYS:
                items.extend((place, first, end, -1))
                merges.extend((num_parts, 1))
                continue
            starts = range(first, end, CHUNK_KEYS)
            merges.extend((num_parts, len(starts)))
            for start in starts:
                items.extend((place, start, min(start + CHUNK_KEYS, end), num_parts))
                num_parts += 1
        table = _tables(requests, metadata, spec.blocks_for(max(request.seq_len for request in requests)))
        rows = array("q", [request.start for request in requests])
        self._held = (table, rows, items, merges)  # the kernel has their addresses
        self._plan = _Plan(
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            spec.block_size,
            step.kv_cache.num_blocks,
            shape.softmax_scale,
            shape.soft_cap or 0.0,
            len(requests),
            len(items) // 4,
            table.stride(0),
            rows.buffer_info()[0],
            table.data_ptr(),
            items.buffer_info()[0],
            merges.buffer_info()[0],
        )
        self._address = ctypes.addressof(self._plan)
        self._num_parts = num_parts
        floats = num_parts * shape.num_heads * (shape.head_dim + 2)
        self._scratch = floats * torch.float32.itemsize // spec.dtype.itemsize  # numbers of the workspace
        step.workspace.reserve(self._scratch)
        kernel = _kernel(spec.dtype)
        bad = kernel.find_bad_request(self._address)
        if bad >= 0:
            raise KVCacheError(
                f"the block table of request {requests[bad].index} names a block that is not among the cache's "
                f"{step.kv_cache.num_blocks}: {table[bad].tolist()}."
            )
        self._decode = kernel.decode

    def attend(self, step: AttentionStep, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        """See `AttentionGroup`.

        Raises:
            ConfigError: queries or sinks do not fit the shape, or queries do not have the cache's dtype.
        """
        heads, dim = step.shape.num_heads, step.shape.head_dim
        dtype = step.kv_cache.spec.dtype
        if q.shape != (step.metadata.slot_mapping.shape[0], heads, dim) or q.dtype is not dtype:
            raise ConfigError(f"{step.shape} needs queries of its own size in {dtype}, not {q.dtype} {[*q.shape]}.")
        if sinks is not None:
            if sinks.shape != (heads,):
                raise ConfigError(f"{step.shape} needs a sink for each of its heads, not {[*sinks.shape]}.")
            sinks = sinks.to(torch.float32).contiguous()
        if q.stride(2) != 1 or q.stride(1) != dim:
            q = q.contiguous()
        q = q.to(torch.float32)
        cache = step.kv_cache
        out = q.new_empty(self.tokens.count, heads, dim)
        self._decode(
            self._address,
            q.data_ptr(),
            q.stride(0),
            cache.keys(layer).data_ptr(),
            cache.values(layer).data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            step.workspace.take(self._scratch).data_ptr(),
            self._num_parts,
            torch.get_num_threads(),
        )
        return out.to(dtype)


def _tables(requests: Sequence[Request], metadata: CommonAttentionMetadata, num_blocks: int) -> Tensor:
    """The requests' rows of the block table, `[n, num_blocks]` int32: a copy, because the table's owner changes it.

    Raises:
        KVCacheError: the table has fewer than `num_blocks` columns.
    """
    table = metadata.block_table
    if table.shape[1] < num_blocks:
        raise KVCacheError(f"a request of {num_blocks} blocks has a block table of {table.shape[1]}.")
    table = table[:, :num_blocks]
    if len(requests) < metadata.num_reqs:
        table = table.index_select(0, *indices(table.device, [request.index for request in requests]))
    return table.to(torch.int32, copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class _Kernel:
    """The functions of `native_decode.c`."""

    find_bad_request: Callable[[int], int]
    decode: Callable[..., None]


@cache
def _kernel(dtype: torch.dtype) -> _Kernel:
    return _load_kernel(dtype)


def _load_kernel(dtype: torch.dtype = torch.float32, lanes: int | None = None) -> _Kernel:
    """Compile and load the functions for a cache of `dtype`.

    Args:
        lanes: floats per vector; by default as many as the processor has.
    """
    source = Path(__file__).with_name("native_decode.c").read_text(encoding="utf-8")
    own = {"LANES": lanes} if lanes else {}
    library = compile_c(source, CHUNK=CHUNK_KEYS, BFLOAT16=int(dtype is torch.bfloat16), **own)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.find_bad_request.argtypes = [pointer]
    library.find_bad_request.restype = number
    decode = kernel_of(library, "decode", pointer, pointer, number, *[pointer] * 5, number, number)
    return _Kernel(library.find_bad_request, decode)
