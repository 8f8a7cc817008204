"""The `native_mla` back end: latent attention in C on a CPU (latent.c and what it follows), one call per layer.

    decode, verify (chain)   absorbed, in C: queries are projected into the latent space, and read the pages in place
    extend                   the same, if that takes fewer multiplications than expanding the prefix
    prompts, other extends   expanded, in C: keys and values of every head are made from the pages, block by block
    tree of drafts           a step that has a mask runs in `torch_mla` (`attention.backends.torch.mla`)

The call rotates and stores every token. In bfloat16 an absorbed query, the latent it attended, and expanded keys and
values are rounded, as they are in torch; with AMX the softmax's weights are, too. All other numbers inside are float32.
A request gives the same bits alone and in any batch, and on any number of threads; a decode also as one of several
drafts, and an expanded prompt wherever it is cut.

Source: DeepSeek-V2 (2024), section 2.1.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from attention.backends.torch.groups import Request, list_requests
from attention.backends.torch.mla import LatentStep, TorchMLABackend
from attention.interface import BackendTraits, MLAInputs, MLAPlan, MLAShape, RopeTable
from attention.kv_cache import MLAKVCache
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError
from ubatch.kernels import kernel_of, this_thread

_DEFINES = {"MOST_ROWS": 1024}
"""Tokens of a prompt that share the keys and values of a head once these are made; a longer prompt makes them again."""


class NativeMLABackend(TorchMLABackend):
    """Plans steps in C over a float32 or bfloat16 cache on a CPU; trees of drafts as `torch_mla`.

    Raises:
        ConfigError: C cannot be compiled here, or the cache has another dtype.
    """

    name: ClassVar[str] = "native_mla"
    traits: ClassVar[BackendTraits] = BackendTraits(mha=False, mla=True, devices=("cpu",), tree_mask=True)

    def __init__(self, shape: MLAShape, kv_cache: MLAKVCache) -> None:
        check_usable(kv_cache.spec)
        _kernel(kv_cache.spec.dtype)
        super().__init__(shape, kv_cache)

    def plan(self, metadata: CommonAttentionMetadata) -> MLAPlan:
        """Prepare the work items of all layers.

        Raises:
            KVCacheError: a request's block table, or a slot, names a block that the cache does not have.
        """
        if metadata.has_tree or not metadata.num_actual_tokens:
            return super().plan(metadata)
        return NativeMLAPlan(LatentStep(self.shape, self.kv_cache, metadata, self._workspace))


class NativeMLAPlan:
    """The work items of a step, and where its kernel reads and writes."""

    def __init__(self, step: LatentStep) -> None:
        spec, self._step = step.kv_cache.spec, step
        self._dtype, self._kernel = spec.dtype, _kernel(spec.dtype)
        absorbed: list[Request] = []
        expanded: list[Request] = []
        for request in list_requests(step.metadata, spec):
            (absorbed if request.query_len == 1 or step.absorbs(request) else expanded).append(request)
        self._slots = step.kv_cache.write_slots(step.metadata.slot_mapping)
        self._num_rows = check_slots(self._kernel.functions, self._slots, step.kv_cache)
        self._prompts: Requests | None = None
        if expanded:
            queries = Queries.of(step.metadata, [request.index for request in expanded])
            item_tokens = self._kernel.functions.prompt_tokens(1)
            self._prompts = self._requests(queries, step.shape.qk_head_dim, step.shape.v_head_dim, item_tokens)
        divided = _divide(absorbed, self._kernel.most_tokens)
        self._calls = [self._make_call(queries) for queries in divided] or [_Call()]  # the first one stores, too
        layers = range(spec.num_layers)
        self._layers = [step.kv_cache.rows(layer).data_ptr() for layer in layers]
        shape = step.shape
        self._thread_bytes = int(
            self._kernel.functions.latent_thread_bytes(
                shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.kv_lora_rank, shape.v_head_dim
            )
        )
        self._rope: RopeTable | None = None
        self._reserve(torch.get_num_threads())

    def _make_call(self, queries: Queries) -> _Call:
        """Every query token as a request of its own."""
        own = replace(queries, rows=array("q", range(len(queries.rows))))
        requests = self._requests(own, self._step.row_size, self._step.shape.kv_lora_rank)
        num_bytes = self._kernel.functions.latent_bytes(requests.address)
        return _Call(requests.address, queries.rows.buffer_info()[0], num_bytes, (requests, queries))

    def _requests(self, queries: Queries, head_dim: int, value_dim: int, item_tokens: int | None = None) -> Requests:
        step, shape = self._step, self._step.shape
        sizes = Sizes(shape.num_heads, 1, head_dim, value_dim, step.row_size, step.row_size, shape.softmax_scale)
        cache_size = (step.kv_cache.spec, step.kv_cache.num_blocks)
        return Requests(self._kernel.functions, sizes, cache_size, step.metadata, queries, item_tokens)

    def _reserve(self, threads: int) -> None:
        """Take memory for so many threads; it is held, because the workspace may grow in later steps."""
        num_bytes = max(call.num_bytes for call in self._calls) + threads * self._thread_bytes
        self._threads = threads
        self._scratch = self._step.workspace.take(-(-num_bytes // self._dtype.itemsize))

    def forward(self, inputs: MLAInputs, layer: int) -> Tensor:
        """See `MLAPlan.forward`.

        Raises:
            ConfigError: a tensor does not fit the shape, or does not have the cache's dtype; a position is not in the
                rotary table.
        """
        shape, rows, heads = self._step.shape, self._num_rows, self._step.shape.num_heads
        nope, rope, rank, value = shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.kv_lora_rank, shape.v_head_dim
        needed = (
            ("queries", inputs.q_nope, (rows, heads, nope)),
            ("rotated queries", inputs.q_rope, (rows, heads, rope)),
            ("latents", inputs.latent, (rows, rank)),
            ("rotated keys", inputs.k_rope, (rows, rope)),
            ("w_uk", inputs.w_uk, (heads, nope, rank)),
            ("w_uv", inputs.w_uv, (heads, rank, value)),
        )
        q_nope, q_rope, latent, k_rope, w_uk, w_uv = (
            checked(shape, what, x, wanted, self._dtype) for what, x, wanted in needed
        )
        w_uk, w_uv = w_uk.contiguous(), w_uv.contiguous()
        cos_sin, positions = self._rope_of(inputs.rope)
        threads = torch.get_num_threads()
        if threads > self._threads:
            self._reserve(threads)
        out = q_nope.new_empty(rows, heads, value)
        prompts = None if self._prompts is None else self._prompts.address
        tokens = (self._step.metadata.num_actual_tokens, rows)
        for call in self._calls:
            self._kernel.attention(
                *(call.address, call.rows_address, prompts, self._slots.data_ptr(), *tokens),
                *(cos_sin.data_ptr(), positions.data_ptr(), inputs.rope.interleaved),
                *(q_nope.data_ptr(), q_nope.stride(0), q_nope.stride(1)),
                *(q_rope.data_ptr(), q_rope.stride(0), q_rope.stride(1)),
                *(latent.data_ptr(), latent.stride(0)),
                *(k_rope.data_ptr(), k_rope.stride(0)),
                *(w_uk.data_ptr(), w_uv.data_ptr(), self._layers[layer], out.data_ptr()),
                *(heads, nope, rope, rank, value),
                *(self._scratch.data_ptr(), self._thread_bytes, threads),
            )
            if this_thread.recording is not None:
                this_thread.recording.mark_rebound(layer)
            prompts, tokens = None, (0, 0)
        return out

    @property
    def repeats(self) -> int | None:
        """Number of rows if calls may be rebound to a later step, because all requests decode one token."""
        metadata = self._step.metadata
        decodes = metadata.max_query_len == 1 and metadata.num_actual_tokens == self._num_rows
        return self._num_rows if decodes and len(self._calls) == 1 else None

    def rebound(self, layer: int, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a recorded call for a layer of this step; see `ubatch.kernels.recording`."""
        (call,) = self._calls
        first = (call.address, call.rows_address, None, self._slots.data_ptr(), *arguments[4:21], self._layers[layer])
        return *first, *arguments[22:28], self._scratch.data_ptr(), *arguments[29:]

    def _rope_of(self, rope: RopeTable) -> tuple[Tensor, Tensor]:
        """The table and the positions, as the kernel reads them; checked once per step."""
        if rope is not self._rope:
            rope_dim = self._step.shape.qk_rope_head_dim
            if rope.cos_sin.shape[1:] != (rope_dim,) or rope.positions.shape != (self._num_rows,) or rope_dim % 2:
                raise ConfigError(
                    f"{self._step.shape} and {self._num_rows} tokens need a rotary table [..., {rope_dim}] and as many "
                    f"positions, not {[*rope.cos_sin.shape]} and {[*rope.positions.shape]}."
                )
            table = rope.cos_sin.to(torch.float32).contiguous()
            positions = rope.positions.to(torch.int64).contiguous()
            bad = self._kernel.functions.find_bad_slot(positions.data_ptr(), self._num_rows, table.shape[0])
            if bad >= 0:
                raise ConfigError(
                    f"token {bad} is at position {int(positions[bad])}, and the rotary table ends at {table.shape[0]}."
                )
            self._rope, self._rope_tensors = rope, (table, positions)
        return self._rope_tensors


@dataclass(frozen=True)
class _Call:
    """Query tokens of a call; by default none.

    Attributes:
        address: of their C struct `Plan`.
        rows_address: of their rows in the step, int64.
        num_bytes: scratch memory that all threads share.
        held: what lies at the addresses.
    """

    address: int | None = None
    rows_address: int | None = None
    num_bytes: int = 0
    held: tuple[Requests, Queries] | None = None


def _divide(requests: Sequence[Request], most: int) -> list[Queries]:
    """The query tokens of `requests`, at most so many together."""
    places = [(request, token) for request in requests for token in range(request.query_len)]
    parts = [places[start : start + most] for start in range(0, len(places), most)]
    return [
        Queries(
            requests=[request.index for request, _ in part],
            lengths=array("i", [request.prefix + token + 1 for request, token in part]),
            rows=array("q", [request.start + token for request, token in part]),
        )
        for part in parts
    ]


@cache
def _kernel(dtype: torch.dtype, **defines: int) -> Kernel:
    """Compile and load the functions for a cache of `dtype`; `defines` as in `attention.backends.native.mha`."""
    sources = ("pages.c", "products.c", "prompts.c", "expanded.c", "latent.c")
    library = load_library(dtype, *sources, **{**_DEFINES, **defines})
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.latent_bytes.argtypes, library.latent_bytes.restype = (pointer,), number
    library.latent_thread_bytes.argtypes, library.latent_thread_bytes.restype = [number] * 4, number
    library.prompt_tokens.argtypes, library.prompt_tokens.restype = (number,), number
    library.latent_tokens.argtypes, library.latent_tokens.restype = (), number
    heads = (pointer, number, number)
    rows = (pointer, number)
    tensors = (*[pointer] * 4, number, number, pointer, pointer, number, *heads * 2, *rows * 2, *[pointer] * 4)
    attention = kernel_of(library, "latent_attention", *tensors, *[number] * 5, pointer, number, number)
    return Kernel(library, attention, int(library.latent_tokens()))
