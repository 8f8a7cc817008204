"""The `flashinfer` back end: flashinfer's own kernels over a paged cache, run through its wrapper classes.

    decode wrapper     one query per request
    prefill wrapper    everything else: prefill, mixed, draft extend, target verify of a chain of drafts
    tree wrapper       the same class, for target verify with a tree of drafts: a wrapper chooses its kernels when it is
                       planned first, and those that are fastest without a mask on Hopper take none

A wrapper is planned once per step and holds one plan: planning the next step makes the last one stale, and a stale plan
refuses to run. All wrappers use one workspace, as they never run at once.

In a CUDA graph all requests have the same number of queries; a request with fewer (draft extend) is padded, see
`FewQueries`. A wrapper's batch size is fixed, so each captured size has its own wrapper; all sizes share the buffers.
A tree mask is extended for padding requests, and packed, in temporary tensors.

With a tree mask the kernel applies no sliding window, so this module applies the window to the mask.

Source: flashinfer's documentation of `BatchPrefillWithPagedKVCacheWrapper` and `BatchDecodeWithPagedKVCacheWrapper`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention.backends.few_queries import FewQueries
from attention.backends.flashinfer.pages import PackedMask, PageLists, PlannedWrapper, WrapperBackend, WrapperPlan
from attention.backends.flashinfer_kernels import FlashInferKernel, find_kernel, pad_rows
from attention.backends.store import store_kv
from attention.interface import AttentionShape, BackendTraits
from attention.kv_cache import FP8, PagedKVCache
from attention.metadata import CommonAttentionMetadata, SpecVerifyInput
from ubatch import ConfigError

WORKSPACE_BYTES = 384 << 20
"""Bytes of scratch per back end object, for partial results of keys that are split over thread blocks."""
_TENSOR_CORE_GROUP = 4  # from this many query heads per key head on, decoding on tensor cores is faster


class FlashInferBackend(WrapperBackend):
    """Plans flashinfer's wrappers over a paged cache of keys and values."""

    name: ClassVar[str] = "flashinfer"
    traits: ClassVar[BackendTraits] = BackendTraits(
        sliding_window=True, soft_cap=True, tree_mask=True, fp8=True, graphs=True
    )
    shape: AttentionShape
    kv_cache: PagedKVCache

    def __init__(self, shape: AttentionShape, kv_cache: PagedKVCache) -> None:
        super().__init__(shape, kv_cache, WORKSPACE_BYTES)
        self._decode_wrapper = find_kernel(FlashInferKernel.DECODE_WRAPPER)
        self._prefill_wrapper = find_kernel(FlashInferKernel.PREFILL_WRAPPER)
        self._decode: PlannedWrapper | None = None
        self._prefill: PlannedWrapper | None = None
        self._tree: PlannedWrapper | None = None

    def plan(self, metadata: CommonAttentionMetadata) -> FlashInferPlan:
        """See `AttentionBackend`; makes this object's earlier plans of the same kind stale."""
        slots, num_tokens = self.kv_cache.write_slots(metadata.slot_mapping), metadata.num_actual_tokens
        if not num_tokens:
            return FlashInferPlan(self, PlannedWrapper(None), 0, slots, 0)
        pages = PageLists.of(metadata, self.kv_cache.spec.block_size)
        mask = tree_mask(metadata.spec_verify, self.shape.sliding_window)
        if metadata.max_query_len == 1 and mask is None:
            if self._decode is None:
                self._decode = self._new_decode_wrapper()
            version = self._plan_decode(self._decode, pages)
            return FlashInferPlan(self, self._decode, version, slots, num_tokens)
        if mask is not None:
            wrapper = self._tree = self._tree or self._new_prefill_wrapper()
        else:
            wrapper = self._prefill = self._prefill or self._new_prefill_wrapper()
        version = self._plan_prefill(wrapper, pages, mask)
        return FlashInferPlan(self, wrapper, version, slots, num_tokens)

    @torch.inference_mode(False)
    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> FlashInferPlan:
        """See `AttentionBackend`. Smaller batches than the captured one are padded to its size.

        Raises:
            ConfigError: no graph buffers, or requests that are not padded to the same number of rows.
        """
        graphs = self.graphs
        queries = graphs.few_queries(self.name, metadata)
        has_tree = metadata.has_tree
        # Starts of each request's queries and pages, tokens in its last page, and start of its mask.
        starts, page_starts, last_page_len, mask_starts = (
            torch.zeros(queries.num_reqs + 1, dtype=torch.int32, device=self.kv_cache.device) for _ in range(4)
        )
        if queries.num_queries == 1 and not has_tree:
            wrapper = self._new_decode_wrapper(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=page_starts,
                paged_kv_indices_buffer=graphs.indices,
                paged_kv_last_page_len_buffer=last_page_len[:-1],
            )
        else:
            wrapper = self._new_prefill_wrapper(
                use_cuda_graph=True,
                qo_indptr_buf=starts,
                paged_kv_indptr_buf=page_starts,
                paged_kv_indices_buf=graphs.indices,
                paged_kv_last_page_len_buf=last_page_len[:-1],
                custom_mask_buf=graphs.masks() if has_tree else None,
                mask_indptr_buf=mask_starts if has_tree else None,
            )
        slots = graphs.batch.slot_mapping[: queries.num_rows]
        plan = FlashInferPlan(self, wrapper, 0, slots, queries.num_rows, queries)
        plan.has_tree = has_tree
        self.replan(plan, metadata)
        return plan

    def replan(self, plan: FlashInferPlan, metadata: CommonAttentionMetadata) -> None:
        queries = self.captured(plan.queries)
        if metadata.num_actual_tokens and metadata.has_tree is not plan.has_tree:
            raise ConfigError(
                f"a graph captured {'with' if plan.has_tree else 'without'} a tree mask cannot run a batch "
                f"{'without' if plan.has_tree else 'with'} one; capture both."
            )
        pages = self.graphs.fill_pages(queries, metadata)
        if queries.num_queries == 1 and not plan.has_tree:
            plan.version = self._plan_decode(plan.wrapper, pages)
            return
        mask = self._captured_mask(metadata.spec_verify, queries) if plan.has_tree else None
        plan.version = self._plan_prefill(plan.wrapper, pages, mask)

    def _captured_mask(self, verify: SpecVerifyInput | None, queries: FewQueries) -> Tensor:
        """The mask of a captured size: padding requests see all of the few tokens that they count as."""
        mask = tree_mask(verify, self.shape.sliding_window)
        missing = queries.num_reqs - (0 if verify is None else verify.num_reqs)
        padding = torch.ones(missing * queries.num_queries**2, dtype=torch.bool, device=self.kv_cache.device)
        return padding if mask is None else torch.cat((mask, padding))

    def _new_decode_wrapper(self, **buffers: Any) -> PlannedWrapper:
        # The tensor-core kernel converts fp8 keys in bulk; the other kernel converts them one by one.
        tensor_cores = self.kv_cache.spec.fp8 or self.shape.group_size >= _TENSOR_CORE_GROUP
        return self.new_wrapper(self._decode_wrapper, "NHD", use_tensor_cores=tensor_cores, **buffers)

    def _new_prefill_wrapper(self, **buffers: Any) -> PlannedWrapper:
        return self.new_wrapper(self._prefill_wrapper, "NHD", **buffers)

    def _plan_decode(self, wrapper: PlannedWrapper, pages: PageLists) -> int:
        return wrapper.plan(*self._sizes(pages), **self._options(windowed=True))

    def _plan_prefill(self, wrapper: PlannedWrapper, pages: PageLists, mask: Tensor | None) -> int:
        plan: Callable[..., int] = (
            wrapper.plan if mask is None else partial(wrapper.plan_masked, PackedMask.of(mask, pages))
        )
        return plan(
            pages.query_starts,
            *self._sizes(pages),
            causal=mask is None,
            seq_lens=pages.lens,  # if missing, flashinfer copies its own lengths, from pageable memory
            **self._options(windowed=mask is None),
        )

    def _sizes(self, pages: PageLists) -> tuple[Any, ...]:
        shape = self.shape
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        return pages.indptr, pages.indices, pages.last_page_len, *heads, self.kv_cache.spec.block_size

    def _options(self, *, windowed: bool) -> dict[str, Any]:
        shape, spec = self.shape, self.kv_cache.spec
        return {
            "sm_scale": shape.softmax_scale,
            "window_left": shape.sliding_window - 1 if windowed and shape.sliding_window is not None else -1,
            "logits_soft_cap": shape.soft_cap,
            "q_data_type": spec.dtype,
            "kv_data_type": FP8 if spec.fp8 else spec.dtype,
        }


class FlashInferPlan(WrapperPlan):
    """A step's plan over keys and values."""

    _backend: FlashInferBackend
    has_tree = False
    """Whether a graph was captured with a tree mask."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionPlan.forward`; sinks are refused, as this back end has none."""
        self._backend.shape.check_sinks(sinks)
        cache = self._backend.kv_cache
        store_kv(cache, layer, k, v, self._slots)
        if not self._num_rows:
            return q.new_zeros(q.shape)
        pools = (cache.keys(layer), cache.values(layer))
        scales: dict[str, float] = {}
        if cache.spec.fp8:
            pools = (pools[0].view(FP8), pools[1].view(FP8))
            scales["k_scale"], scales["v_scale"] = cache.scales(layer)
        query = q[: self._num_rows].contiguous()
        if self.queries is None:
            return pad_rows(self.wrapper.run(self.version, query, pools, **scales), q.shape[0])
        out = self.wrapper.run(self.version, self.queries.pad(query), pools, **scales)
        return self.queries.finish(out)


def tree_mask(verify: SpecVerifyInput | None, window: int | None) -> Tensor | None:
    """A verify batch's mask, flat bool as in `SpecVerifyInput`, with keys outside of the sliding window hidden.

    Args:
        window: how many positions a query sees, its own included. Siblings in the tree share a position.

    Returns:
        None for a chain: causal attention with the kernel's own window gives the same result.
    """
    if verify is None or verify.custom_mask is None or window is None:
        return None if verify is None else verify.custom_mask
    drafts, parts = verify.num_draft_tokens, []
    for request, prefix in enumerate(verify.prefix_lens):
        mask = verify.mask_of(request)
        mine = verify.positions[request * drafts : (request + 1) * drafts]
        positions = torch.cat((torch.arange(prefix, device=mine.device), mine))
        near = positions > (mine - window)[:, None]
        parts.append((near if mask is None else mask & near).flatten())
    return torch.cat(parts)
