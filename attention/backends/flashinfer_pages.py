"""What both back ends on flashinfer's wrappers share: which plan a wrapper holds, and the pages that it is told.

flashinfer wants the pages of all requests in one list, not in a table, and some of the rest on the host. In a CUDA
graph a wrapper copies what it is told into buffers that it was given, so that kernels read the same addresses ever
after. Planning happens between replays. The lists are made without allocating; flashinfer itself takes temporary memory
while it plans.

Source: flashinfer's documentation of its wrappers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.backends.base import BackendTraits, GraphLimits
from attention.backends.few_queries import FewQueries, GraphState
from attention.backends.trtllm_common import (
    RequestBatch,
    Workspace,
    compute_capability,
    ragged_positions,
    refuse_dtype,
)
from attention.kv_cache import MLAKVCache, PagedKVCache
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError

__all__ = ["INT_WORKSPACE_BYTES", "FlashInferGraphs", "PageLists", "PlannedWrapper", "WrapperBackend", "WrapperPlan"]

INT_WORKSPACE_BYTES = 8 << 20
"""What a wrapper allocates by itself, on the device, for its plan."""


def refuse_old_gpu(name: str, device: torch.device) -> None:
    """Refuse GPUs before Ampere.

    Raises:
        ConfigError: it is one.
    """
    capability = compute_capability(device)
    if capability is not None and capability < (8, 0):
        raise ConfigError(
            f"attention back end {name!r} needs a GPU of SM80 or later, this is SM{capability[0]}{capability[1]}. "
            "Choose 'triton' or 'torch'."
        )


class WrapperBackend:
    """A back end on flashinfer's wrappers: its scratch memory, how many wrappers it made, and its graph buffers.

    Args:
        shape: of the attention.
        kv_cache: that is read and written.
        workspace_bytes: of scratch per back end object.

    Raises:
        ConfigError: a dtype or a GPU that flashinfer does not run on.
    """

    name: ClassVar[str]
    traits: ClassVar[BackendTraits]

    def __init__(self, shape: Any, kv_cache: Any, workspace_bytes: int) -> None:
        device = kv_cache.device
        refuse_dtype(self.name, device, kv_cache.spec.dtype, (torch.bfloat16, torch.float16))
        refuse_old_gpu(self.name, device)
        self.shape = shape
        self.kv_cache = kv_cache
        self._workspace = Workspace(workspace_bytes, device)
        self._graphs: FlashInferGraphs | None = None
        self._num_wrappers = 0

    @property
    def nbytes(self) -> int:
        """See `AttentionBackend`."""
        graphs = 0 if self._graphs is None else self._graphs.nbytes
        return self._workspace.nbytes + self._num_wrappers * INT_WORKSPACE_BYTES + graphs

    def init_graph_buffers(self, limits: GraphLimits) -> None:
        """See `AttentionBackend`."""
        self._graphs = FlashInferGraphs(limits, self.kv_cache, self.traits.seq_len_fill)

    @torch.inference_mode(False)
    def new_wrapper(self, kind: Callable[..., Any], *args: Any, **options: Any) -> PlannedWrapper:
        """A wrapper of flashinfer over this object's scratch memory."""
        self._num_wrappers += 1
        return PlannedWrapper(kind(self._workspace.get(), *args, **options))


class PlannedWrapper:
    """A wrapper of flashinfer, which knows one plan at a time; `version` says which.

    Args:
        wrapper: planned by its `plan`, run by its `run`.
    """

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.version = 0

    def plan(self, *args: Any, **kwargs: Any) -> int:
        """Plan; the version of this plan."""
        self.wrapper.plan(*args, **kwargs)
        self.version += 1
        return self.version

    def run(self, version: int, *args: Any, **kwargs: Any) -> Tensor:
        """Run the plan of that version.

        Raises:
            ConfigError: the wrapper has been planned again since.
        """
        if version != self.version:
            raise ConfigError(
                "a stale attention plan: its back end has planned another step since, and flashinfer keeps one plan. "
                "Run all layers of a step before planning the next one, or give each its own back end."
            )
        out: Tensor = self.wrapper.run(*args, **kwargs)
        return out


class WrapperPlan:
    """A planned wrapper, for every layer of a step. A subclass says how it is run.

    Args:
        backend: whose cache is read.
        wrapper: planned for this step.
        version: of that plan.
        slots: `[T]` int64, where the new tokens go in the cache.
        num_rows: rows of queries that belong to requests; the step's first ones.
        queries: how they are padded, in a graph.
    """

    def __init__(
        self,
        backend: Any,
        wrapper: PlannedWrapper,
        version: int,
        slots: Tensor,
        num_rows: int,
        queries: FewQueries | None = None,
    ) -> None:
        self.wrapper = wrapper
        self.version = version
        self.queries = queries
        self._backend = backend
        self._slots = slots
        self._num_rows = num_rows


@dataclass(frozen=True)
class PageLists:
    """Every request's pages one after the other, as flashinfer takes them.

    Attributes:
        indptr: `[R + 1]` int32 on the host, where each request's pages start.
        indices: `[indptr[-1]]` int32 on the device, the pages.
        last_page_len: `[R]` int32 on the host, tokens in each request's last page.
        lens: `[R]` int32 on the host, each request's tokens.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    lens: Tensor

    @classmethod
    def of(cls, batch: RequestBatch, block_size: int) -> PageLists:
        """The pages of a batch that is not captured."""
        counts = [-(-length // block_size) for length in batch.lens]
        owner, place = ragged_positions(counts, batch.block_table.device)
        return cls.on_host(np.array(batch.lens, dtype=np.int32), batch.block_table[owner, place], block_size)

    @classmethod
    def on_host(cls, lens: NDArray[np.int32], indices: Tensor, block_size: int) -> PageLists:
        """The lists of requests of `lens` tokens whose pages are `indices`."""
        counts = -(-lens // block_size)
        indptr = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(counts, out=indptr[1:])
        last = (lens - (counts - 1) * block_size).astype(np.int32)
        return cls(torch.from_numpy(indptr), indices, torch.from_numpy(last), torch.from_numpy(lens))


class FlashInferGraphs(GraphState):
    """The buffers of one lane's graphs, and the list of their pages."""

    @torch.inference_mode(False)
    def __init__(self, limits: GraphLimits, kv_cache: PagedKVCache | MLAKVCache, seq_len_fill: int) -> None:
        super().__init__(limits, kv_cache, seq_len_fill)
        spec = kv_cache.spec
        # Queries of padding take pages, too: fewer than one for each of them, and one more per request.
        max_pages = limits.max_reqs * (spec.blocks_for(limits.max_seq_len) + 1) + spec.blocks_for(limits.max_tokens)
        self.indices = torch.zeros(max_pages, dtype=torch.int32, device=kv_cache.device)
        self._places = torch.zeros(max_pages, dtype=torch.int64, device=kv_cache.device)
        self._masks: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        masks = 0 if self._masks is None else self._masks.nbytes
        return super().nbytes + self.indices.nbytes + self._places.nbytes + masks

    @torch.inference_mode(False)
    def masks(self) -> Tensor:
        """Room for the bits of any captured tree mask; made when the first tree is captured."""
        if self._masks is None:
            limits = self.limits
            num_bytes = limits.max_tokens * limits.max_seq_len // 8 + limits.max_reqs  # every request's last may be cut
            self._masks = torch.zeros(num_bytes, dtype=torch.uint8, device=self.indices.device)
        return self._masks

    def fill_pages(self, queries: FewQueries, metadata: CommonAttentionMetadata) -> PageLists:
        """Copy a batch in, allocating nothing on the device; its pages, each request's queries padded."""
        self.fill(queries, metadata)
        lens = np.full(queries.num_reqs, queries.num_queries, dtype=np.int32)
        for request, (new, length) in enumerate(zip(metadata.query_lens_cpu, metadata.seq_lens_cpu, strict=True)):
            if new:
                lens[request] = length - new + queries.num_queries
        return PageLists.on_host(lens, self._pages(lens), self.batch.block_size)

    def _pages(self, lens: NDArray[np.int32]) -> Tensor:
        table = self.batch.block_table
        counts = -(-lens // self.batch.block_size)
        owner = np.repeat(np.arange(len(lens)), counts)
        place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        flat = owner * table.shape[1] + place
        places, indices = self._places[: len(flat)], self.indices[: len(flat)]
        places.copy_(torch.from_numpy(flat))
        return torch.index_select(table.view(-1), 0, places, out=indices)
