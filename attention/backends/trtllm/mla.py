"""The `trtllm_mla` back end: TensorRT-LLM's latent attention kernels, called through flashinfer.

Requests with few queries attend *absorbed*, over the latents in the cache; prompts *expanded*, over keys and values.

    decode         [B, 1, H, 576] queries: `w_uk` brings a query to the latents' space, `w_uv` brings the result back
    target verify  [B, D, H, 576], causal; a chain of drafts only
    draft extend   ragged, so padded to [B, most, H, 576], and the result unpadded; see `FewQueries`
    prefill        the new tokens among themselves, and the cached prefix in chunks; see `trtllm_mla_prefill`

A mixed batch runs its decoding requests absorbed and the others expanded. All new latents are written before any
request attends, because requests may share a block that one of them fills.

The page table has one entry per page, and its rows are padded for two kernels: the decode kernel reads it in tiles of
128 tokens, kernels that fill it write it in tiles of 4096, so a row is a multiple of both. That costs little (4,097
tokens at page size 64 take 128 entries of 4 bytes instead of 65), and every entry is a valid page.

With an fp8 cache one kernel rotates, quantises and merges queries and latents. It has one static scale of 1.0, so the
cache's must be 1.0.

Source: flashinfer's documentation of `trtllm_batch_decode_with_kv_cache_mla` and `mla_rope_quantize_fp8`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention.backends.few_queries import FewQueries, GraphState, KernelBackend
from attention.backends.flashinfer_kernels import (
    FlashInferKernel,
    RequestBatch,
    absorb,
    find_kernel,
    pad_rows,
    project_latents,
    refuse_gpu,
    refuse_mla_shape,
    refuse_tree_mask,
    rows_of,
)
from attention.backends.store import store_latents
from attention.backends.trtllm.mla_prefill import ExpandedPart, plan_expanded
from attention.interface import BackendTraits, GraphLimits, MLAInputs, MLAShape
from attention.kv_cache import FP8, MLAKVCache
from attention.metadata import CommonAttentionMetadata
from attention.modes import MODES, Kernel
from ubatch import ConfigError

WORKSPACE_BYTES = 150 << 20
"""Bytes of scratch per back end object; the first ones are the kernels' counters."""
DECODE_TILE = 128
"""Tokens whose pages the decode kernel reads at once."""
TABLE_TILE = 4096
"""Tokens whose pages a kernel that fills a table writes at once."""
_EXPANDED_HEAD_DIMS = ((192, 128), (128, 128), (256, 256))
"""(queries and keys, values) that the ragged kernel is compiled for."""


def padded_blocks(num_blocks: int, block_size: int) -> int:
    """Entries of a table's row for `num_blocks` pages: the next multiple of a decode tile's and a table tile's pages.

    Raises:
        ConfigError: a page is larger than a decode tile.
    """
    if block_size > DECODE_TILE:
        raise ConfigError(f"latent attention kernels take pages of at most {DECODE_TILE} tokens, not {block_size}.")
    unit = math.lcm(DECODE_TILE // block_size, TABLE_TILE // block_size)
    return -(-num_blocks // unit) * unit


class _Graphs(GraphState):
    """The buffers of one lane's graphs, and its padded page table."""

    @torch.inference_mode(False)
    def __init__(self, limits: GraphLimits, kv_cache: MLAKVCache, seq_len_fill: int) -> None:
        super().__init__(limits, kv_cache, seq_len_fill)
        spec = kv_cache.spec
        width = padded_blocks(spec.blocks_for(self.longest), spec.block_size)
        self._block_table = torch.zeros(limits.max_reqs, width, dtype=torch.int32, device=kv_cache.device)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._block_table.nbytes

    def part(self, queries: FewQueries) -> AbsorbedPart:
        """A part that reads these buffers; `fill_part` fills them."""
        return AbsorbedPart(
            rows=slice(0, queries.num_rows),
            slots=self.batch.slot_mapping[: queries.num_rows],
            queries=queries,
            block_table=self._block_table[: queries.num_reqs],
            max_seq_len=self.limits.max_seq_len + queries.num_queries,
        )

    def fill_part(self, part: AbsorbedPart, metadata: CommonAttentionMetadata) -> None:
        """Copy a batch into the buffers that `part` reads."""
        self.fill(part.queries, metadata)
        table = self.batch.block_table[: part.queries.num_reqs]
        part.block_table[:, : table.shape[1]].copy_(table)


class TRTLLMMLABackend(KernelBackend[_Graphs]):
    """Plans calls of TensorRT-LLM's kernels over a paged cache of latents."""

    name: ClassVar[str] = "trtllm_mla"
    traits: ClassVar[BackendTraits] = BackendTraits(mha=False, mla=True, fp8=True, graphs=True, block_sizes=(32, 64))
    graphs_kind = _Graphs

    shape: MLAShape
    kv_cache: MLAKVCache

    def __init__(self, shape: MLAShape, kv_cache: MLAKVCache) -> None:
        super().__init__(shape, kv_cache, WORKSPACE_BYTES, (torch.bfloat16,))
        refuse_mla_shape(self.name, shape)
        if (shape.qk_head_dim, shape.v_head_dim) not in _EXPANDED_HEAD_DIMS:
            raise ConfigError(
                f"attention back end {self.name!r} takes heads of (queries, values) {_EXPANDED_HEAD_DIMS} numbers, not "
                f"({shape.qk_head_dim}, {shape.v_head_dim}). Choose 'torch'."
            )
        refuse_gpu(self.name, kv_cache.device, lambda sm: sm[0] == 10, "SM100 or SM103", "'flashinfer'")
        self.decode = find_kernel(FlashInferKernel.TRTLLM_MLA_DECODE)
        self.ragged = find_kernel(FlashInferKernel.TRTLLM_RAGGED)
        self.rope_quantize = find_kernel(FlashInferKernel.MLA_ROPE_QUANTIZE)

    def plan(self, metadata: CommonAttentionMetadata) -> TRTLLMMLAPlan:
        """See `AttentionBackend`; requests with few queries in one part, prompts in another.

        Raises:
            ConfigError: a tree mask, or an fp8 cache with a scale.
        """
        self._refuse(metadata)
        batch = RequestBatch.of(metadata, self.kv_cache.spec.block_size)
        slots = self.kv_cache.write_slots(metadata.slot_mapping)
        absorbed = _attend_absorbed(metadata, batch)
        few = [request for request in range(batch.num_reqs) if absorbed[request]]
        prompts = [request for request in range(batch.num_reqs) if not absorbed[request]]
        parts: list[AbsorbedPart | ExpandedPart] = []
        if few:
            rows = rows_of(batch.query_lens, few, slots.device)
            parts.append(self._plan_absorbed(batch.select(few), rows, slots[rows]))
        if prompts:
            rows = rows_of(batch.query_lens, prompts, slots.device)
            parts.append(plan_expanded(self.kv_cache, batch.select(prompts), rows, slots[rows]))
        return TRTLLMMLAPlan(self, parts)

    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> TRTLLMMLAPlan:
        """See `AttentionBackend`. Smaller batches than the captured one are padded to its size.

        Raises:
            ConfigError: no graph buffers; a tree mask; requests that are not padded to the same number of rows.
        """
        part = self.graphs.part(self.graphs.few_queries(self.name, metadata))
        plan = TRTLLMMLAPlan(self, [part], captured=part)
        self.replan(plan, metadata)
        return plan

    def replan(self, plan: TRTLLMMLAPlan, metadata: CommonAttentionMetadata) -> None:
        part = self.captured(plan.captured)
        self._refuse(metadata)
        self.graphs.fill_part(part, metadata)

    def _plan_absorbed(self, batch: RequestBatch, rows: slice | Tensor, slots: Tensor) -> AbsorbedPart:
        spec = self.kv_cache.spec
        most = max(batch.query_lens)
        # Padding a request to `most` queries makes it longer, and its row of the table must cover the longer request.
        longest = max(batch.prefixes) + most
        table = batch.block_table.new_zeros(batch.num_reqs, padded_blocks(spec.blocks_for(longest), spec.block_size))
        columns = min(table.shape[1], batch.block_table.shape[1])
        table[:, :columns] = batch.block_table[:, :columns]
        return AbsorbedPart(rows, slots, FewQueries.for_step(batch), table, longest)

    def _refuse(self, metadata: CommonAttentionMetadata) -> None:
        refuse_tree_mask(self.name, metadata)
        if self.kv_cache.spec.fp8:
            for layer in range(self.kv_cache.spec.num_layers):
                if self.kv_cache.scale(layer) != 1.0:
                    raise ConfigError(
                        f"attention back end {self.name!r} quantises at a scale of 1.0, but layer {layer} of the cache "
                        f"has {self.kv_cache.scale(layer)}. Leave the cache's scale at 1.0, or choose 'torch'."
                    )


@dataclass(frozen=True)
class AbsorbedPart:
    """Requests that attend over latents.

    Attributes:
        rows: the rows of their tokens in the step.
        slots: `[n]` int64, the slots of their latents.
        block_table: `[R, padded blocks]` int32.
        max_seq_len: length of the longest request, padded; in a graph, the longest that its limits allow.
    """

    rows: slice | Tensor
    slots: Tensor
    queries: FewQueries
    block_table: Tensor
    max_seq_len: int

    def store(self, backend: TRTLLMMLABackend, inputs: MLAInputs, layer: int) -> Tensor:
        """Write the latents; return the queries, rotated and in the latents' space, `[n, heads, 576]`."""
        cache = backend.kv_cache
        q_latent = absorb(inputs.q_nope, inputs.w_uk)
        if cache.spec.fp8:
            return self._store_fp8(backend, inputs, q_latent, layer)
        store_latents(cache, layer, inputs, self.slots)
        return torch.cat((q_latent, inputs.rope.rotate(inputs.q_rope)), dim=-1)

    def _store_fp8(self, backend: TRTLLMMLABackend, inputs: MLAInputs, q_latent: Tensor, layer: int) -> Tensor:
        """The same with the fused kernel, which writes the parts of a query, or of a cache row, side by side."""
        rank = backend.shape.kv_lora_rank
        width = backend.kv_cache.spec.numbers_per_token
        query = torch.empty(*q_latent.shape[:2], width, dtype=FP8, device=q_latent.device)
        row = torch.empty(q_latent.shape[0], width, dtype=FP8, device=q_latent.device)
        backend.rope_quantize(
            q_rope=inputs.q_rope,
            k_rope=inputs.k_rope,
            q_nope=q_latent,
            k_nope=inputs.latent,
            cos_sin_cache=inputs.rope.cos_sin,
            pos_ids=inputs.rope.positions,
            is_neox=not inputs.rope.interleaved,
            quantize_dtype=FP8,
            quant_scale_q=1.0,
            quant_scale_kv=1.0,
            q_rope_out=query[..., rank:],
            k_rope_out=row[..., rank:],
            q_nope_out=query[..., :rank],
            k_nope_out=row[..., :rank],
        )
        backend.kv_cache.pool.memory[layer].flatten(0, 1).index_copy_(0, self.slots, row.view(torch.uint8))
        return query

    def attend(self, backend: TRTLLMMLABackend, query: Tensor, inputs: MLAInputs, layer: int) -> Tensor:
        """`[n, heads, v_head_dim]`."""
        cache, shape = backend.kv_cache, backend.shape
        pages = cache.rows(layer)
        if cache.spec.fp8:
            pages = pages.view(FP8)
        scale = cache.scale(layer)
        attended = backend.decode(
            query=self.queries.pad(query).unflatten(0, (self.queries.num_reqs, self.queries.num_queries)),
            kv_cache=pages.unsqueeze(1),
            workspace_buffer=backend.workspace.get(),
            qk_nope_head_dim=shape.qk_nope_head_dim,
            kv_lora_rank=shape.kv_lora_rank,
            qk_rope_head_dim=shape.qk_rope_head_dim,
            block_tables=self.block_table,
            seq_lens=self.queries.seq_lens,
            max_seq_len=self.max_seq_len,
            bmm1_scale=scale * shape.softmax_scale,  # the queries' own scale is 1
            bmm2_scale=scale,
        )
        return project_latents(self.queries.unpad(attended.flatten(0, 1)), inputs.w_uv)


class TRTLLMMLAPlan:
    """A step's parts, for every layer.

    Args:
        captured: the only part of a plan in a graph.
    """

    def __init__(
        self, backend: TRTLLMMLABackend, parts: list[AbsorbedPart | ExpandedPart], captured: AbsorbedPart | None = None
    ) -> None:
        backend.workspace.get()
        self.captured = captured
        self._parts = parts
        self._backend = backend

    def forward(self, inputs: MLAInputs, layer: int) -> Tensor:
        backend, num_rows = self._backend, inputs.q_nope.shape[0]
        mine = [(part, _rows(inputs, part.rows)) for part in self._parts]
        stored: list[Any] = [part.store(backend, own, layer) for part, own in mine]
        outs = [part.attend(backend, state, own, layer) for (part, own), state in zip(mine, stored, strict=True)]
        if self.captured is not None:
            return self.captured.queries.zero_padding(outs[0])
        if len(outs) == 1:
            return pad_rows(outs[0], num_rows)
        out = inputs.q_nope.new_zeros(num_rows, backend.shape.num_heads, backend.shape.v_head_dim)
        for part, own_out in zip(self._parts, outs, strict=True):
            out[part.rows] = own_out
        return out


def _attend_absorbed(metadata: CommonAttentionMetadata, batch: RequestBatch) -> list[bool]:
    """For each request, whether it attends over latents: those with few queries; in a prefill batch, the decodes."""
    if MODES[metadata.mode].kernel is Kernel.DECODE:
        return [True] * batch.num_reqs
    return [new == 1 and prefix > 0 for new, prefix in zip(batch.query_lens, batch.prefixes, strict=True)]


def _rows(inputs: MLAInputs, rows: slice | Tensor) -> MLAInputs:
    """The inputs of a part's tokens; unchanged if the part has all tokens, so that `rope` looks angles up only once."""
    if rows == slice(0, inputs.q_nope.shape[0]):
        return inputs
    return replace(
        inputs,
        q_nope=inputs.q_nope[rows],
        q_rope=inputs.q_rope[rows],
        latent=inputs.latent[rows],
        k_rope=inputs.k_rope[rows],
        rope=replace(inputs.rope, positions=inputs.rope.positions[rows]),
    )
