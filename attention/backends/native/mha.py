"""The `native` back end: the `torch` back end on a CPU, with a C kernel for decodes (pages.c and decode.c).

    decode                      one new token: the kernel reads keys and values in place in the cache, once, computes in
                                float32, and rounds results once. A step of decodes alone is one call per layer, which
                                stores the new keys and values, too
    fresh, extend, verify       as in the `torch` back end (`attention.backends.torch.sdpa`)

A request's decode gives the same bits alone and in any batch, and on any number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from attention.backends.native.decodes import Decodes, check_usable, load_library
from attention.backends.torch.groups import Request, TokenRows, Workspace
from attention.backends.torch.sdpa import (
    AttentionGroup,
    AttentionStep,
    TorchAttentionBackend,
    TorchAttentionPlan,
    make_groups,
)
from attention.interface import AttentionPlan, AttentionShape, BackendTraits
from attention.kv_cache import PagedKVCache
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError
from ubatch.kernels.c_jit import kernel_of

__all__ = ["NativeAttentionBackend", "NativeAttentionPlan"]


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
        check_usable(kv_cache.spec)
        _kernel(kv_cache.spec.dtype)
        super().__init__(shape, kv_cache)

    def plan(self, metadata: CommonAttentionMetadata) -> AttentionPlan:
        """Prepare the decodes' work items, and `torch`'s groups for the other requests.

        Raises:
            KVCacheError: a decode's block table names a block that the cache does not have.
        """
        if metadata.max_query_len == 1 and not metadata.has_tree:
            return NativeAttentionPlan(self.shape, self.kv_cache, metadata, self._workspace)
        step = AttentionStep(self.shape, self.kv_cache, metadata, self._workspace)
        decodes: list[Request] = []
        others: list[Request] = []
        for request in step.requests:
            (decodes if request.query_len == 1 and not metadata.has_tree else others).append(request)
        groups: list[AttentionGroup] = [_DecodeGroup(step, decodes)] if decodes else []
        return TorchAttentionPlan(step, groups + make_groups(step, others))


class _DecodeKernel:
    """Decodes of one step, and the kernel that computes a layer of them.

    Args:
        stores: whether the kernel stores the step's keys and values.

    Raises:
        KVCacheError: see `Decodes`.
    """

    def __init__(
        self,
        shape: AttentionShape,
        kv_cache: PagedKVCache,
        metadata: CommonAttentionMetadata,
        requests: Sequence[int],
        workspace: Workspace,
        *,
        stores: bool,
    ) -> None:
        self.shape, self.dtype = shape, kv_cache.spec.dtype
        self._kv_cache = kv_cache  # the kernel has its address
        kernel = _kernel(self.dtype)
        num_rows, dim = metadata.slot_mapping.shape[0], shape.head_dim
        self.q_shape = (num_rows, shape.num_heads, dim)
        self.kv_shape = (num_rows, shape.num_kv_heads, dim)
        self.out_shape = self.q_shape if stores else (len(requests), shape.num_heads, dim)
        self.decodes = Decodes(
            kernel.library,
            (shape.num_heads, shape.num_kv_heads, dim, dim),
            shape.softmax_scale,
            shape.soft_cap,
            shape.sliding_window,
            kv_cache.spec,
            kv_cache.num_blocks,
            metadata,
            requests,
            kv_cache.write_slots(metadata.slot_mapping) if stores else None,
        )
        self._decode, self._address = kernel.decode, self.decodes.address
        layers = range(kv_cache.spec.num_layers)
        self._layers = [(kv_cache.keys(layer).data_ptr(), kv_cache.values(layer).data_ptr()) for layer in layers]
        floats = self.decodes.num_parts * shape.num_heads * (dim + 2)
        # Held, because the workspace of later steps may be another one.
        self._scratch = workspace.take(floats * torch.float32.itemsize // self.dtype.itemsize)
        self._scratch_address = self._scratch.data_ptr()

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: int, sinks: Tensor | None) -> Tensor:
        """One layer, `out_shape`. `k` and `v` are None if they are in the cache already.

        Raises:
            ConfigError: a tensor does not fit the shape, or does not have the cache's dtype.
        """
        dtype = self.dtype
        if q.shape != self.q_shape or q.dtype is not dtype:
            raise ConfigError(f"{self.shape} needs queries of its own size in {dtype}, not {q.dtype} {[*q.shape]}.")
        if q.stride(2) != 1:
            q = q.contiguous()
        if sinks is not None:
            sinks = self._checked(sinks)
        out = q.new_empty(self.out_shape)
        stored: tuple[int | None, ...] = (None, 0, 0, None, 0, 0)
        if k is not None and v is not None:
            for x in (k, v):
                if x.shape != self.kv_shape or x.dtype is not dtype:
                    raise ConfigError(
                        f"{self.shape} needs keys and values of its own size in {dtype}, not {x.dtype} {[*x.shape]}."
                    )
            k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
            stored = (k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(), v.stride(0), v.stride(1))
        self._decode(
            self._address,
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            *stored,
            *self._layers[layer],
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            self._scratch_address,
            torch.get_num_threads(),
        )
        return out

    def _checked(self, sinks: Tensor) -> Tensor:
        if sinks.shape != (self.shape.num_heads,):
            raise ConfigError(f"{self.shape} needs a sink for each of its heads, not {[*sinks.shape]}.")
        return sinks.to(torch.float32).contiguous()


class NativeAttentionPlan:
    """A step without other requests than decodes: one call per layer."""

    def __init__(
        self, shape: AttentionShape, kv_cache: PagedKVCache, metadata: CommonAttentionMetadata, workspace: Workspace
    ) -> None:
        requests: Sequence[int] = range(metadata.num_reqs)
        if metadata.num_actual_tokens < metadata.num_reqs:
            requests = [index for index, length in enumerate(metadata.query_lens_cpu) if length]
        self._shape = shape
        self._kernel = _DecodeKernel(shape, kv_cache, metadata, requests, workspace, stores=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionPlan.forward`.

        Raises:
            ConfigError: a tensor does not fit the shape; sinks are given to a shape that has none, or are missing.
        """
        self._shape.check_sinks(sinks)
        return self._kernel.attend(q, k, v, layer, sinks)


class _DecodeGroup:
    """The decodes of a step that has other requests, too, as an `AttentionGroup`."""

    def __init__(self, step: AttentionStep, requests: Sequence[Request]) -> None:
        self.tokens = TokenRows(requests, step.metadata.slot_mapping.device)
        places = [request.index for request in requests]
        self._kernel = _DecodeKernel(step.shape, step.kv_cache, step.metadata, places, step.workspace, stores=False)

    def attend(self, step: AttentionStep, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        """See `AttentionGroup`; errors as `_DecodeKernel.attend`."""
        return self._kernel.attend(q, None, None, layer, sinks)


@dataclass(frozen=True)
class _Kernel:
    """The functions of pages.c and decode.c."""

    library: ctypes.CDLL
    decode: Callable[..., None]


@cache
def _kernel(dtype: torch.dtype) -> _Kernel:
    return _load_kernel(dtype)


def _load_kernel(dtype: torch.dtype, **defines: int) -> _Kernel:
    """Compile and load the functions for a cache of `dtype`.

    Args:
        defines: `LANES`, floats per vector; by default as many as the processor has.
    """
    library = load_library(dtype, "pages.c", "decode.c", **defines)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    strided = (pointer, number, number)
    return _Kernel(library, kernel_of(library, "decode", pointer, *strided * 3, *[pointer] * 5, number))
