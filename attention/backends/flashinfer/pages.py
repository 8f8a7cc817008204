"""Code that both back ends on flashinfer's wrappers share: which plan a wrapper holds, and the lists of pages it takes.

flashinfer takes the pages of all requests as one list on the device, not as a table, and all lengths on the host. The
list is made on the device from the block table; the host's lengths are in pinned memory, so that flashinfer's copies of
them do not block. In a CUDA graph a wrapper copies its inputs into buffers that it was given, so that kernels always
read the same addresses. Planning happens between replays. The lists are made without allocating; flashinfer itself
allocates temporary memory while it plans.

A tree mask is packed here: flashinfer can pack it, too, but waits for the device to learn the packed length.

Source: flashinfer's documentation of its wrappers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.backends.few_queries import FewQueries, GraphState, KernelBackend
from attention.backends.flashinfer_kernels import refuse_gpu
from attention.interface import GraphLimits
from attention.kv_cache import MLAKVCache, PagedKVCache
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError
from ubatch.streams import staged, to_device

INT_WORKSPACE_BYTES = 8 << 20
"""Bytes that a wrapper allocates on the device for its plan."""


class WrapperBackend(KernelBackend["FlashInferGraphs"]):
    """A back end on flashinfer's wrappers; counts those that it made.

    Raises:
        ConfigError: a dtype or a GPU that flashinfer does not run on.
    """

    def __init__(self, shape: Any, kv_cache: Any, workspace_bytes: int) -> None:
        super().__init__(shape, kv_cache, workspace_bytes, (torch.bfloat16, torch.float16))
        refuse_gpu(self.name, kv_cache.device, lambda sm: sm >= (8, 0), "SM80 or later", "'triton' or 'torch'")
        self.graphs_kind = FlashInferGraphs
        self._num_wrappers = 0

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._num_wrappers * INT_WORKSPACE_BYTES

    @torch.inference_mode(False)
    def new_wrapper(self, kind: Callable[..., Any], *args: Any, **options: Any) -> PlannedWrapper:
        """A wrapper of flashinfer over this object's scratch memory."""
        self._num_wrappers += 1
        return PlannedWrapper(kind(self.workspace.get(), *args, **options))


class PlannedWrapper:
    """A wrapper of flashinfer. It holds one plan at a time; `version` numbers the plans.

    Args:
        wrapper: planned by its `plan`, run by its `run`.
    """

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.version = 0

    def plan(self, *args: Any, **kwargs: Any) -> int:
        """Plan a step; return the version of this plan."""
        self.wrapper.plan(*args, **kwargs)
        self.version += 1
        return self.version

    def plan_masked(self, mask: PackedMask, *args: Any, **kwargs: Any) -> int:
        """The same with a tree mask.

        Raises:
            ConfigError: this version of flashinfer stores masks in another way.
        """
        version = self.plan(*args, packed_custom_mask=mask.bits, **kwargs)
        # For a packed mask flashinfer computes the starts in bits, but its kernels read them as bytes.
        starts = getattr(self.wrapper, "_mask_indptr_buf", None)
        if starts is None:
            raise ConfigError(
                "the installed flashinfer does not say where it keeps the starts of packed masks. Draft chains, or "
                "choose the attention back end 'triton' for trees of drafts."
            )
        starts.copy_(mask.starts)
        return version

    def run(self, version: int, *args: Any, **kwargs: Any) -> Tensor:
        """Run the plan with this version.

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
        wrapper: planned for this step.
        slots: `[T]` int64, the new tokens' slots in the cache.
        num_rows: rows of queries that belong to requests; the step's first ones.
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
class PackedMask:
    """The masks of all requests as bits, lowest bit first; each request's mask starts at a new byte.

    Attributes:
        bits: `[starts[-1]]` uint8.
        starts: `[R + 1]` int32, each request's first byte. Both are on the device.
    """

    bits: Tensor
    starts: Tensor

    @classmethod
    def of(cls, mask: Tensor, pages: PageLists) -> PackedMask:
        """Pack a flat bool mask: one row per query, with one entry per token of its request."""
        sizes = [new * length for new, length in zip(pages.query_lens, pages.seq_lens, strict=True)]
        first_bytes = tuple(accumulate((-(-size // 8) for size in sizes), initial=0))
        edges = torch.tensor(tuple(accumulate(sizes, initial=0)))
        starts, edges = to_device((torch.tensor(first_bytes, dtype=torch.int32), edges), mask.device)
        byte = torch.arange(first_bytes[-1], dtype=torch.int32, device=mask.device)
        owner = torch.searchsorted(starts[1:], byte, right=True)
        bit = torch.arange(8, dtype=torch.uint8, device=mask.device)
        place = ((byte - starts[owner]) * 8 + edges[owner])[:, None] + bit
        inside = place < edges[1:][owner][:, None]
        shown = mask[place.clamp(max=mask.shape[0] - 1)] & inside
        return cls((shown.to(torch.uint8) << bit).sum(dim=1, dtype=torch.uint8), starts)


@dataclass(frozen=True)
class PageLists:
    """Every request's pages one after the other, as flashinfer takes them.

    Attributes:
        query_lens: queries of each request, on the host.
        seq_lens: tokens of each request, on the host.
        query_starts: `[R + 1]` int32, where each request's queries start. This and the next three are in host memory,
            pinned if there is a GPU: flashinfer reads them there, and copies them to the device.
        indptr: `[R + 1]` int32, where each request's pages start.
        last_page_len: `[R]` int32, tokens in each request's last page.
        lens: `[R]` int32, each request's tokens.
        indices: `[indptr[-1]]` int32 on the device, the pages.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    query_starts: Tensor
    indptr: Tensor
    last_page_len: Tensor
    lens: Tensor
    indices: Tensor

    @classmethod
    def of(cls, batch: CommonAttentionMetadata, block_size: int) -> PageLists:
        """The pages of those requests that have queries, at least one, in a batch that is not captured."""
        active = [each for each in zip(batch.query_lens_cpu, batch.seq_lens_cpu, strict=True) if each[0]]
        tensors = batch.block_table, batch.query_start_loc, batch.seq_lens
        return cls._listed(active, tensors, block_size)

    @classmethod
    def captured(cls, graphs: FlashInferGraphs, queries: FewQueries, batch: CommonAttentionMetadata) -> PageLists:
        """The pages of the batch in `graphs`: every request counts as `Q` queries behind its prefix."""
        count, padded = queries.num_reqs, queries.num_queries
        lens = [padded] * count
        for request, (new, length) in enumerate(zip(batch.query_lens_cpu, batch.seq_lens_cpu, strict=True)):
            if new:
                lens[request] = length - new + padded
        static = graphs.batch
        tensors = static.block_table[:count], static.query_start_loc[: count + 1], static.seq_lens[:count]
        requests = [(padded, length) for length in lens]
        return cls._listed(requests, tensors, static.block_size, padded, graphs.indices)

    @classmethod
    def _listed(
        cls,
        requests: Sequence[tuple[int, int]],
        tensors: tuple[Tensor, Tensor, Tensor],
        block_size: int,
        padded_queries: int = 0,
        room: Tensor | None = None,
    ) -> PageLists:
        """The lists for requests given as (queries, tokens). Pages are listed on the device, in `room` if given."""
        query_lens, seq_lens = (tuple(each) for each in zip(*requests, strict=True))
        counts = [-(-length // block_size) for length in seq_lens]
        starts, indptr = (tuple(accumulate(each, initial=0)) for each in (query_lens, counts))
        last = tuple(length - (count - 1) * block_size for length, count in zip(seq_lens, counts, strict=True))
        table, total = tensors[0], indptr[-1]
        indices = torch.empty(total, dtype=torch.int32, device=table.device) if room is None else room[:total]
        _lister(table.device)(
            indices, *tensors, block_size=block_size, most_pages=max(counts), padded_queries=padded_queries
        )
        host = [torch.from_numpy(np.array(each, dtype=np.int32)) for each in (starts, indptr, last, seq_lens)]
        query_starts, page_starts, last_page_len, lens = staged(host, table.device)
        return cls(query_lens, seq_lens, query_starts, page_starts, last_page_len, lens, indices)


def list_pages_in_torch(
    indices: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    block_size: int,
    most_pages: int,
    padded_queries: int = 0,
) -> None:
    """`attention.kernels.batch.list_pages` in torch."""
    new = query_start_loc[1:] - query_start_loc[:-1]
    behind = seq_lens - new + padded_queries if padded_queries else seq_lens
    lens = torch.where(new > 0, behind, padded_queries)
    counts = (lens + (block_size - 1)) // block_size
    ends = counts.cumsum(0)
    page = torch.arange(indices.shape[0], device=indices.device)
    owner = torch.searchsorted(ends, page, right=True)
    indices.copy_(block_table[owner, page - (ends - counts)[owner]])


def _lister(device: torch.device) -> Callable[..., None]:
    """The function that lists pages: one kernel launch if Triton runs on the device, else torch."""
    if importlib.util.find_spec("triton") is not None:
        from attention.kernels.batch import list_pages
        from ubatch.kernels.triton_jit import INTERPRETED

        if device.type == "cuda" or INTERPRETED:
            return list_pages
    return list_pages_in_torch


class FlashInferGraphs(GraphState):
    """The buffers of one lane's graphs, and the list of the batch's pages."""

    @torch.inference_mode(False)
    def __init__(self, limits: GraphLimits, kv_cache: PagedKVCache | MLAKVCache, seq_len_fill: int) -> None:
        super().__init__(limits, kv_cache, seq_len_fill)
        spec = kv_cache.spec
        # Padding queries take pages, too: less than one page each, and one more per request.
        max_pages = limits.max_reqs * (spec.blocks_for(limits.max_seq_len) + 1) + spec.blocks_for(limits.max_tokens)
        self.indices = torch.zeros(max_pages, dtype=torch.int32, device=kv_cache.device)
        self._masks: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        masks = 0 if self._masks is None else self._masks.nbytes
        return super().nbytes + self.indices.nbytes + masks

    @torch.inference_mode(False)
    def masks(self) -> Tensor:
        """Buffer for the bits of any captured tree mask; made when the first tree is captured."""
        if self._masks is None:
            limits = self.limits
            num_bytes = limits.max_tokens * limits.max_seq_len // 8 + limits.max_reqs  # last bytes may be partial
            self._masks = torch.zeros(num_bytes, dtype=torch.uint8, device=self.indices.device)
        return self._masks

    def fill_pages(self, queries: FewQueries, metadata: CommonAttentionMetadata) -> PageLists:
        """Copy a batch in, without allocating on the device. Returns its pages, with each request's queries padded."""
        self.fill(queries, metadata)
        return PageLists.captured(self, queries, metadata)
