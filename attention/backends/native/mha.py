"""The `native` back end: kernels in C on a CPU (pages.c, products.c, prompts.c and layer.c), one call per layer.

    decode                   one new token: reads keys and values in place in the cache, once
    fresh, extend, chain     several new tokens: products in blocks of rows and keys
    tree of drafts           a step that has a mask runs as in the `torch` back end (`attention.backends.torch.sdpa`)

The call stores the new keys and values, too. Everything inside is float32, and results are rounded once; but with AMX
the softmax's weights of several new tokens are rounded to bfloat16. A request's tokens give the same bits alone and in
any batch, and on any number of threads.
"""

import ctypes
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention.backends.native.requests import (
    Kernel,
    Queries,
    Requests,
    Sizes,
    check_slots,
    check_usable,
    checked,
    load_library,
)
from attention.backends.torch.groups import Workspace
from attention.backends.torch.sdpa import TorchAttentionBackend
from attention.interface import AttentionPlan, AttentionShape, BackendTraits
from attention.kv_cache import PagedKVCache
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError
from ubatch.kernels import kernel_of, this_thread


class NativeAttentionBackend(TorchAttentionBackend):
    """Plans steps in C over a float32 or bfloat16 cache on a CPU; trees of drafts as `torch`.

    Raises:
        ConfigError: C cannot be compiled here, or the cache has another dtype.
    """

    name: ClassVar[str] = "native"
    traits: ClassVar[BackendTraits] = BackendTraits(
        devices=("cpu",), sliding_window=True, soft_cap=True, sinks=True, v_head_dim=True, tree_mask=True
    )

    def __init__(self, shape: AttentionShape, kv_cache: PagedKVCache) -> None:
        check_usable(kv_cache.spec)
        _kernel(kv_cache.spec.dtype)
        super().__init__(shape, kv_cache)

    def plan(self, metadata: CommonAttentionMetadata) -> AttentionPlan:
        """Prepare the work items of all layers.

        Raises:
            KVCacheError: a request's block table, or a slot, names a block that the cache does not have.
        """
        if metadata.has_tree or not metadata.num_actual_tokens:
            return super().plan(metadata)
        return NativeAttentionPlan(self.shape, self.kv_cache, metadata, self._workspace)


class NativeAttentionPlan:
    """The work items of a step, and where its kernel reads and writes."""

    def __init__(
        self, shape: AttentionShape, kv_cache: PagedKVCache, metadata: CommonAttentionMetadata, workspace: Workspace
    ) -> None:
        spec, self._shape = kv_cache.spec, shape
        self._dtype, kernel = spec.dtype, _kernel(spec.dtype)
        self._kv_cache = kv_cache  # the kernel has its address
        heads, kv_heads, dim, value_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim
        sizes = Sizes(
            *(heads, kv_heads, dim, value_dim, kv_heads * dim, kv_heads * value_dim),
            *(shape.softmax_scale, shape.soft_cap, shape.sliding_window),
        )
        cache_size = (spec, kv_cache.num_blocks)
        self._decodes = self._prompts = None
        if metadata.max_query_len == 1 and metadata.num_actual_tokens == metadata.num_reqs:
            self._decodes = Requests(
                kernel.functions, sizes, cache_size, metadata, Queries.of(metadata, range(metadata.num_reqs))
            )
        else:
            query_lens = metadata.query_lens_cpu
            decodes = [index for index, length in enumerate(query_lens) if length == 1]
            prompts = [index for index, length in enumerate(query_lens) if length > 1]
            if decodes:
                self._decodes = Requests(kernel.functions, sizes, cache_size, metadata, Queries.of(metadata, decodes))
            if prompts:
                item_tokens = kernel.functions.prompt_tokens(shape.group_size)
                self._prompts = Requests(
                    kernel.functions, sizes, cache_size, metadata, Queries.of(metadata, prompts), item_tokens
                )
        slots = self._slots = kv_cache.write_slots(metadata.slot_mapping)
        num_rows = check_slots(kernel.functions, slots, kv_cache)
        self._q_shape, self._out_shape = (num_rows, heads, dim), (num_rows, heads, value_dim)
        self._k_shape, self._v_shape = (num_rows, kv_heads, dim), (num_rows, kv_heads, value_dim)
        self._layers = kv_cache.addresses
        self._kernel, self._workspace = kernel.attention, workspace
        self._first_arguments = (
            None if self._decodes is None else self._decodes.address,
            None if self._prompts is None else self._prompts.address,
            slots.data_ptr(),
            metadata.num_actual_tokens,
            num_rows,
        )
        self._part_bytes = 0
        if self._decodes is not None:
            self._part_bytes = self._decodes.num_parts * heads * (value_dim + 2) * torch.float32.itemsize
        self._prompt_bytes = 0 if self._prompts is None else int(kernel.functions.prompt_scratch_bytes(dim, value_dim))
        self._reserve(torch.get_num_threads())

    def _reserve(self, threads: int) -> None:
        """Take memory for so many threads; it is held, because the workspace may grow in later steps."""
        num_bytes = self._part_bytes + threads * self._prompt_bytes
        self._threads = threads
        self._scratch = self._workspace.take(-(-num_bytes // self._dtype.itemsize))
        self._scratch_address = self._scratch.data_ptr()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionPlan.forward`.

        Raises:
            ConfigError: a tensor does not fit the shape, or does not have the cache's dtype; sinks are given to a shape
                that has none, or are missing.
        """
        if sinks is not None or self._shape.sinks:
            self._shape.check_sinks(sinks)
        dtype = self._dtype
        if not (q.dtype is k.dtype is v.dtype is dtype and q.stride(2) == k.stride(2) == v.stride(2) == 1) or (
            q.shape != self._q_shape or k.shape != self._k_shape or v.shape != self._v_shape
        ):
            q = checked(self._shape, "queries", q, self._q_shape, dtype)
            k = checked(self._shape, "keys", k, self._k_shape, dtype)
            v = checked(self._shape, "values", v, self._v_shape, dtype)
        if sinks is not None:
            if sinks.shape != (self._shape.num_heads,):
                raise ConfigError(f"{self._shape} needs a sink for each of its heads, not {[*sinks.shape]}.")
            sinks = sinks.to(torch.float32).contiguous()
        threads = torch.get_num_threads()
        if threads > self._threads and self._prompt_bytes:
            self._reserve(threads)
        out = q.new_empty(self._out_shape)
        self._kernel(
            *self._first_arguments,
            *(q.data_ptr(), q.stride(0), q.stride(1)),
            *(k.data_ptr(), k.stride(0), k.stride(1)),
            *(v.data_ptr(), v.stride(0), v.stride(1)),
            *self._layers[layer],
            *(None if sinks is None else sinks.data_ptr(), out.data_ptr()),
            *(self._scratch_address, self._prompt_bytes, threads),
        )
        if this_thread.recording is not None:
            this_thread.recording.mark_rebound(layer)
        return out

    def rebound(self, layer: int, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a recorded call for a layer of this step; see `ubatch.kernels.recording`.

        The step must have as many rows and only decodes, as the recorded one had.
        """
        q_k_v, sinks_out, sizes = arguments[5:14], arguments[16:18], arguments[19:]
        return *self._first_arguments, *q_k_v, *self._layers[layer], *sinks_out, self._scratch_address, *sizes

    @property
    def repeats(self) -> int | None:
        """Number of rows if calls may be rebound to a later step, because all requests decode one token."""
        return self._q_shape[0] if self._prompts is None and self._decodes is not None else None


@cache
def _kernel(dtype: torch.dtype, **defines: int) -> Kernel:
    """Compile and load the functions for a cache of `dtype`.

    Args:
        defines: `LANES`, floats per vector; `TILES`, whether AMX is used; by default what the processor has.
    """
    library = load_library(dtype, "pages.c", "products.c", "prompts.c", "layer.c", **defines)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.prompt_tokens.argtypes, library.prompt_tokens.restype = (number,), number
    library.prompt_scratch_bytes.argtypes, library.prompt_scratch_bytes.restype = (number, number), number
    strided = (pointer, number, number)
    types = (*[pointer] * 3, number, number, *strided * 3, *[pointer] * 5, number, number)
    return Kernel(library, kernel_of(library, "attention", *types))
