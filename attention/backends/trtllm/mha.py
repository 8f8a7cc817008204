"""The `trtllm_mha` back end: TensorRT-LLM's multi-head attention kernels, called through flashinfer.

A batch is one kernel call, either of

    decode     the same number of queries per request: one (decode), or one per draft of a chain (target verify). A
               draft model's decode steps are also decode calls, of sequences that include the tokens drafted so far
    context    ragged queries, causal behind each request's prefix: prefill, mixed, draft extend

In a graph draft extend is a decode call, too, with padded queries (see `FewQueries`): the context kernel's behaviour is
undefined for a request without queries, and padding requests have none.

A tree of drafts is refused: trtllm-gen takes no mask. The decode function's `mask` argument is for XQA only.

Both calls read the paged cache in place. Their arguments, and what is easy to get wrong:

    layout       pools are [pages, page, kv heads, dim], kernels want [pages, kv heads, page, dim]: a permuted view
    scales       scores are multiplied by `q_scale * k_scale * softmax_scale`, the output by `v_scale`: an fp8 cache
                 holds values divided by the scales, so passing 1.0 for `v_scale` scales the output wrongly
    window       `window_left` is how many tokens are seen *besides* the query's own: one less than `sliding_window`
    sinks        one logit per head in the softmax's denominator, float32
    tables       every entry of the page table is a valid page, also past a request's end: kernels load whole tiles

With an fp8 cache, trtllm-gen gets fp8 queries, too, at scale 1.0, because its context kernels take both in fp8 or
neither; the output is in the compute dtype. On XQA the queries keep their dtype.

On SM100 and SM103 flashinfer runs trtllm-gen. On SM90 and SM120 it runs decode on XQA; its kernel for ragged queries
there wants keys and values in one tensor, but this cache has two pools. So on those GPUs this back end only decodes,
one token per request, and prefill needs another back end (`--prefill-attention-backend`).

Source: flashinfer's documentation of `trtllm_batch_decode_with_kv_cache` and `trtllm_batch_context_with_kv_cache`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.backends.few_queries import FewQueries, GraphState, KernelBackend
from attention.backends.flashinfer_kernels import (
    FlashInferKernel,
    RequestBatch,
    compute_capability,
    find_kernel,
    pad_rows,
    refuse_gpu,
    refuse_tree_mask,
)
from attention.backends.store import store_kv
from attention.interface import AttentionShape, BackendTraits
from attention.kv_cache import FP8, PagedKVCache, quantize_fp8
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError, ForwardMode

WORKSPACE_BYTES = 512 << 20
"""Bytes of scratch per back end object; the first ones are the kernels' counters."""


class _Kernels(StrEnum):
    """Which kernels flashinfer runs on this GPU."""

    TRTLLM_GEN = "trtllm-gen"
    XQA = "xqa"


_KERNELS_BY_MAJOR = {9: _Kernels.XQA, 10: _Kernels.TRTLLM_GEN, 12: _Kernels.XQA}


class TRTLLMMHABackend(KernelBackend[GraphState]):
    """Plans calls of TensorRT-LLM's kernels over a paged cache of keys and values."""

    name: ClassVar[str] = "trtllm_mha"
    traits: ClassVar[BackendTraits] = BackendTraits(
        sliding_window=True, sinks=True, fp8=True, graphs=True, block_sizes=(16, 32, 64)
    )
    graphs_kind = GraphState
    shape: AttentionShape
    kv_cache: PagedKVCache

    def __init__(self, shape: AttentionShape, kv_cache: PagedKVCache) -> None:
        super().__init__(shape, kv_cache, WORKSPACE_BYTES, (torch.bfloat16, torch.float16))
        self.kernels = _kernels_on(kv_cache.device)
        self.decode = find_kernel(FlashInferKernel.TRTLLM_DECODE)
        self.context = find_kernel(FlashInferKernel.TRTLLM_CONTEXT)

    def plan(self, metadata: CommonAttentionMetadata) -> TRTLLMMHAPlan:
        """See `AttentionBackend`; one call of the decode or of the context kernel.

        Raises:
            ConfigError: a tree mask, or queries that the kernels of this GPU do not take.
        """
        refuse_tree_mask(self.name, metadata)
        batch = RequestBatch.of(metadata, self.kv_cache.spec.block_size)
        most = max(batch.query_lens, default=1)
        uniform = min(batch.query_lens, default=1) == most
        ragged = most > 1 and not (uniform and metadata.mode is ForwardMode.TARGET_VERIFY)
        self._refuse_queries(most)
        return TRTLLMMHAPlan(
            self,
            _Call(
                slots=self.kv_cache.write_slots(metadata.slot_mapping),
                num_rows=batch.num_tokens,
                seq_lens=batch.seq_lens,
                block_table=batch.block_table,
                max_query_len=most,
                max_seq_len=max(batch.lens, default=0),
                query_start_loc=batch.query_start_loc() if ragged else None,
                kv_start_loc=F.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)) if ragged else None,
            ),
        )

    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> TRTLLMMHAPlan:
        """See `AttentionBackend`. Smaller batches than the captured one are padded to its size.

        Raises:
            ConfigError: no graph buffers; a tree mask; requests that are not padded to the same number of rows.
        """
        queries = self.graphs.few_queries(self.name, metadata)
        self._refuse_queries(queries.num_queries)
        batch = self.graphs.batch
        plan = TRTLLMMHAPlan(
            self,
            _Call(
                slots=batch.slot_mapping[: queries.num_rows],
                num_rows=queries.num_rows,
                seq_lens=queries.seq_lens,
                block_table=batch.block_table[: queries.num_reqs],
                max_query_len=queries.num_queries,
                max_seq_len=self.graphs.longest,
                queries=queries,
            ),
        )
        self.replan(plan, metadata)
        return plan

    def replan(self, plan: TRTLLMMHAPlan, metadata: CommonAttentionMetadata) -> None:
        queries = self.captured(plan.call.queries)
        refuse_tree_mask(self.name, metadata)
        self.graphs.fill(queries, metadata)

    def _refuse_queries(self, most: int) -> None:
        if self.kernels is _Kernels.XQA and most > 1:
            raise ConfigError(
                f"attention back end {self.name!r} decodes one token per request on this GPU; prefill, verify and "
                "draft extend need SM100 or SM103. Keep it for decode and choose another one for the rest with "
                "--prefill-attention-backend, or choose 'flashinfer' for both."
            )


def _kernels_on(device: torch.device) -> _Kernels:
    gpus = "SM90, SM100, SM103 or SM120"
    refuse_gpu(TRTLLMMHABackend.name, device, lambda sm: sm[0] in _KERNELS_BY_MAJOR, gpus, "'flashinfer' or 'triton'")
    capability = compute_capability(device)
    return _Kernels.TRTLLM_GEN if capability is None else _KERNELS_BY_MAJOR[capability[0]]


@dataclass(frozen=True)
class _Call:
    """A kernel call's arguments other than a layer's tensors.

    Attributes:
        slots: `[T]` int64, the slots of the new keys and values.
        num_rows: rows of queries that the kernel takes; the step's first ones.
        seq_lens: `[R]` int32.
        block_table: `[R, blocks]` int32.
        max_query_len: most queries of a request; in a decode call, the queries of every request.
        max_seq_len: longest of `seq_lens`; in a graph, the longest that its limits allow.
        query_start_loc: `[R + 1]` int32, for a context call; None makes it a decode call.
        kv_start_loc: `[R + 1]` int32, cumulative sums of `seq_lens`, for a context call; None in a decode call.
    """

    slots: Tensor
    num_rows: int
    seq_lens: Tensor
    block_table: Tensor
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor | None = None
    kv_start_loc: Tensor | None = None
    queries: FewQueries | None = None


class TRTLLMMHAPlan:
    """One call, for every layer of a step."""

    def __init__(self, backend: TRTLLMMHABackend, call: _Call) -> None:
        self.call = call
        self._backend = backend
        self._workspace = backend.workspace.get()
        window = backend.shape.sliding_window
        self._window_left = -1 if window is None else window - 1

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionPlan.forward`.

        Raises:
            ConfigError: sinks are missing, or given to a shape without sinks.
        """
        call, backend = self.call, self._backend
        backend.shape.check_sinks(sinks)
        cache = backend.kv_cache
        store_kv(cache, layer, k, v, call.slots)
        if not call.num_rows:
            return q.new_zeros(q.shape)
        query = self._query(q[: call.num_rows])
        if call.queries is None:
            return pad_rows(self._attend(query, layer, sinks), q.shape[0])
        return call.queries.finish(self._attend(call.queries.pad(query), layer, sinks))

    def _attend(self, query: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        """Call the kernel for queries `[n, heads, head_dim]`."""
        call, backend = self.call, self._backend
        cache = backend.kv_cache
        k_scale, v_scale = cache.scales(layer)
        arguments = {
            "query": query,
            "kv_cache": (_by_head(cache.keys(layer)), _by_head(cache.values(layer))),
            "workspace_buffer": self._workspace,
            "block_tables": call.block_table,
            "seq_lens": call.seq_lens,
            "bmm1_scale": k_scale * backend.shape.softmax_scale,  # the queries' own scale is 1
            "bmm2_scale": v_scale,
            "window_left": self._window_left,
            "out_dtype": cache.spec.dtype,
            "sinks": None if sinks is None else sinks.float(),
        }
        if call.query_start_loc is None:
            out: Tensor = backend.decode(**arguments, max_seq_len=call.max_seq_len, q_len_per_req=call.max_query_len)
            return out
        out = backend.context(
            **arguments,
            max_q_len=call.max_query_len,
            max_kv_len=call.max_seq_len,
            batch_size=call.seq_lens.shape[0],
            cum_seq_lens_q=call.query_start_loc,
            cum_seq_lens_kv=call.kv_start_loc,
        )
        return out

    def _query(self, q: Tensor) -> Tensor:
        if self._backend.kv_cache.spec.fp8 and self._backend.kernels is _Kernels.TRTLLM_GEN:
            return quantize_fp8(q.contiguous(), 1.0).view(FP8)
        return q.contiguous()


def _by_head(pool: Tensor) -> Tensor:
    """A layer's keys or values as a view `[pages, kv heads, page, dim]`; bytes of an fp8 cache are viewed as fp8."""
    if pool.dtype == torch.uint8:
        pool = pool.view(FP8)
    return pool.permute(0, 2, 1, 3)
