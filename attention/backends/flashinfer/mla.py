"""The `flashinfer` back end for latent attention: every query absorbed, over the latents in the cache.

flashinfer's wrapper takes ragged causal queries behind any prefix, so one call serves decode, verify (a chain), draft
extend, and prefill. Prefill costs more arithmetic absorbed than expanded (512 elements per value instead of 128): this
back end is for GPUs that `trtllm_mla` does not support.

Planning and CUDA graphs work as in `attention.backends.flashinfer.mha`. The wrapper is called with the arguments of
flashinfer 0.6, lists of pages as separate arguments; 0.7 takes them, too, and warns once that it prefers one object.

Source: flashinfer's documentation of `BatchMLAPagedAttentionWrapper`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from attention.backends.flashinfer.pages import PageLists, PlannedWrapper, WrapperBackend, WrapperPlan
from attention.backends.flashinfer_kernels import (
    FlashInferKernel,
    absorb,
    compute_capability,
    find_kernel,
    pad_rows,
    project_latents,
    refuse_mla_shape,
    refuse_tree_mask,
)
from attention.backends.store import store_latents
from attention.interface import BackendTraits, MLAInputs, MLAShape
from attention.kv_cache import MLAKVCache
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError

WORKSPACE_BYTES = 128 << 20
"""Bytes of scratch per back end object, for partial results of keys that are split over thread blocks."""
_TILE_ROWS = 128  # rows of a causal tile, a row being a head of a query: a tile must end where a query does


class FlashInferMLABackend(WrapperBackend):
    """Plans flashinfer's wrapper over a paged cache of latents."""

    name: ClassVar[str] = "flashinfer_mla"
    traits: ClassVar[BackendTraits] = BackendTraits(mha=False, mla=True, graphs=True)
    shape: MLAShape
    kv_cache: MLAKVCache

    def __init__(self, shape: MLAShape, kv_cache: MLAKVCache) -> None:
        super().__init__(shape, kv_cache, WORKSPACE_BYTES)
        refuse_mla_shape(self.name, shape)
        if _TILE_ROWS % shape.num_heads:
            raise ConfigError(
                f"attention back end {self.name!r} takes 1, 2, 4, 8, 16, 32, 64 or 128 heads, not {shape.num_heads}: "
                "with others its kernels omit a key at some lengths. Choose 'triton' or 'torch'."
            )
        self._wrapper_class = find_kernel(FlashInferKernel.MLA_WRAPPER)
        self._eager: PlannedWrapper | None = None

    def plan(self, metadata: CommonAttentionMetadata) -> FlashInferMLAPlan:
        """See `AttentionBackend`; makes this object's earlier plans stale.

        Raises:
            ConfigError: the batch has a tree mask.
        """
        refuse_tree_mask(self.name, metadata)
        slots = self.kv_cache.write_slots(metadata.slot_mapping)
        if not metadata.num_actual_tokens:
            return FlashInferMLAPlan(self, PlannedWrapper(None), 0, slots, 0)
        pages = PageLists.of(metadata, self.kv_cache.spec.block_size)
        if self._eager is None:
            self._eager = self._make_wrapper()
        version = self._plan(self._eager, pages)
        return FlashInferMLAPlan(self, self._eager, version, slots, metadata.num_actual_tokens)

    @torch.inference_mode(False)
    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> FlashInferMLAPlan:
        """See `AttentionBackend`. Smaller batches than the captured one are padded to its size.

        Raises:
            ConfigError: no graph buffers; a tree mask; requests that are not padded to the same number of rows.
        """
        graphs = self.graphs
        queries = graphs.few_queries(self.name, metadata)
        starts, page_starts, lens = (
            torch.zeros(queries.num_reqs + 1, dtype=torch.int32, device=self.kv_cache.device) for _ in range(3)
        )
        wrapper = self._make_wrapper(
            use_cuda_graph=True,
            qo_indptr=starts,
            kv_indptr=page_starts,
            kv_indices=graphs.indices,
            kv_len_arr=lens[:-1],
        )
        slots = graphs.batch.slot_mapping[: queries.num_rows]
        plan = FlashInferMLAPlan(self, wrapper, 0, slots, queries.num_rows, queries)
        self.replan(plan, metadata)
        return plan

    def replan(self, plan: FlashInferMLAPlan, metadata: CommonAttentionMetadata) -> None:
        queries = self.captured(plan.queries)
        refuse_tree_mask(self.name, metadata)
        pages = self.graphs.fill_pages(queries, metadata)
        plan.version = self._plan(plan.wrapper, pages)

    def _make_wrapper(self, **buffers: Any) -> PlannedWrapper:
        # By default, flashinfer may choose kernels that cannot be planned a second time in a graph.
        kernels = "fa3" if compute_capability(self.kv_cache.device) == (9, 0) else "fa2"
        return self.new_wrapper(self._wrapper_class, backend=kernels, **buffers)

    def _plan(self, wrapper: PlannedWrapper, pages: PageLists) -> int:
        shape, spec = self.shape, self.kv_cache.spec
        return wrapper.plan(
            qo_indptr=pages.query_starts,
            kv_indptr=pages.indptr,
            kv_indices=pages.indices,
            kv_len_arr=pages.lens,
            num_heads=shape.num_heads,
            head_dim_ckv=shape.kv_lora_rank,
            head_dim_kpe=shape.qk_rope_head_dim,
            page_size=spec.block_size,
            causal=True,
            sm_scale=shape.softmax_scale,
            q_data_type=spec.dtype,
            kv_data_type=spec.dtype,
        )


class FlashInferMLAPlan(WrapperPlan):
    """A step's plan over latents."""

    _backend: FlashInferMLABackend

    def forward(self, inputs: MLAInputs, layer: int) -> Tensor:
        backend, queries = self._backend, self.queries
        cache, rank = backend.kv_cache, backend.shape.kv_lora_rank
        store_latents(cache, layer, inputs, self._slots)
        if not self._num_rows:
            return inputs.q_nope.new_zeros(*inputs.q_nope.shape[:2], backend.shape.v_head_dim)
        pages = cache.rows(layer)
        q_latent = absorb(inputs.q_nope[: self._num_rows], inputs.w_uk)
        q_rope = inputs.rope.rotate(inputs.q_rope)[: self._num_rows]
        if queries is not None:
            q_latent, q_rope = queries.pad(q_latent), queries.pad(q_rope)
        attended = self.wrapper.run(
            self.version,
            q_nope=q_latent.contiguous(),
            q_pe=q_rope.contiguous(),
            ckv_cache=pages[..., :rank],
            kpe_cache=pages[..., rank:],
        )
        if queries is None:
            return pad_rows(project_latents(attended, inputs.w_uv), inputs.q_nope.shape[0])
        return queries.zero_padding(project_latents(queries.unpad(attended), inputs.w_uv))
