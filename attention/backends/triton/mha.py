"""The `triton` back end: this project's own kernels, on any GPU that Triton compiles for.

    write       the step's keys and values go to the cache, one program per token
    decode      requests with few queries: keys split over programs, then reduced
    prefill     requests with more: tiles of queries over the cache

A plan launches the kernels that its batch needs. A batch with decodes and prompts launches both kernels, and each skips
the other's requests. The kernels compute everything on the device, from the metadata's tensors, so a captured plan runs
any batch that is copied into the same tensors. A graph fixes only the number of programs, which is chosen for the
longest request that its limits allow.

Tile sizes and key splits are measured on the GPU the first time that a kind of batch is planned; see
`attention.kernels.tuning`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from attention.backends.triton.common import (
    DEVICES,
    PaddedOutput,
    StaticTensors,
    TritonBackend,
    paged_batch,
    refuse_other_batch,
    tree_of,
)
from attention.interface import AttentionShape, BackendTraits, GraphLimits
from attention.kernels.attend import num_tiles, plan_tiles, prefill_attention
from attention.kernels.cache import write_kv
from attention.kernels.decode import DecodeSplits, decode_attention
from attention.kernels.tile import PagedBatch, PagedLayer, TileSize
from attention.kernels.tuning import tune_decode, tune_prefill
from attention.kv_cache import PagedKVCache
from attention.metadata import CommonAttentionMetadata
from attention.modes import MODES, Kernel, SplitKind
from ubatch import ConfigError

_MAX_DECODE_ROWS = 128  # queries times heads of a group in one tile of the decode kernel


@dataclass(frozen=True)
class TritonAttentionPlan:
    """The kernel launches for one step of one lane.

    Attributes:
        slots: `[T]` int64, the slots of its tokens' keys and values.
        output: where the output is written if there are tokens that belong to no request; else None.
        splits: how the keys of requests with few queries are split; None if there are no such requests.
        tiles: query tiles of the requests with more queries; None if there are no such requests.
    """

    shape: AttentionShape
    kv_cache: PagedKVCache
    batch: PagedBatch
    slots: Tensor
    output: PaddedOutput | None
    splits: DecodeSplits | None
    workspace: Tensor
    tiles: Tensor | None
    tile_size: TileSize

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionPlan.forward`.

        Raises:
            ConfigError: the number of tokens differs from the plan's; or sinks are missing, or given to a shape without
                sinks.
        """
        if q.shape[0] != self.slots.shape[0]:
            raise ConfigError(f"attention was planned for {self.slots.shape[0]} tokens and got {q.shape[0]}.")
        self.shape.check_sinks(sinks)
        write_kv(self.kv_cache, layer, k, v, self.slots)
        if self.output is None:
            out = q.new_empty(*q.shape[:2], self.shape.value_dim)
        else:
            out = self.output.memory[: q.shape[0]]
        where = PagedLayer(self.shape, self.kv_cache, layer, self.batch, sinks)
        if self.splits is not None:
            decode_attention(q, out, where, self.splits, self.workspace)
        if self.tiles is not None:
            prefill_attention(q, out, where, self.tiles, self.tile_size)
        return out

    def plan_tiles(self) -> None:
        """Assign the tiles to the batch's requests, on the device."""
        if self.tiles is not None:
            decoded = 0 if self.splits is None else self.splits.max_queries
            queries = self.tile_size.queries(self.shape)
            plan_tiles(self.tiles, self.batch.query_start_loc, self.batch.num_reqs, queries, min_queries=decoded + 1)


@dataclass(frozen=True)
class TritonGraphPlan(TritonAttentionPlan):
    """A plan whose tensors are static."""

    static: StaticTensors

    def replan(self, metadata: CommonAttentionMetadata) -> None:
        """Describe another batch; see `AttentionBackend.replan`."""
        num_reqs, num_tokens = self.batch.num_reqs, self.slots.shape[0]
        most = self.splits.max_queries if self.tiles is None and self.splits is not None else None
        refuse_other_batch(metadata, self.batch, most)
        self.static.fill(metadata, num_reqs, num_tokens)
        self.plan_tiles()


class TritonAttentionBackend(TritonBackend):
    """Plans attention with this project's Triton kernels over a paged cache."""

    name: ClassVar[str] = "triton"
    traits: ClassVar[BackendTraits] = BackendTraits(
        devices=DEVICES,
        sliding_window=True,
        soft_cap=True,
        sinks=True,
        v_head_dim=True,
        tree_mask=True,
        fp8=True,
        graphs=True,
    )

    shape: AttentionShape
    kv_cache: PagedKVCache

    def plan(self, metadata: CommonAttentionMetadata) -> TritonAttentionPlan:
        """See `AttentionBackend`. Nothing waits for the device, and nothing is copied to it."""
        lens = {length for length in metadata.query_lens_cpu if length}
        limit = self._max_decode_queries(metadata)
        decoded = max((length for length in lens if length <= limit), default=0)
        splits = self._splits(metadata.num_reqs, decoded, metadata.max_seq_len) if decoded else None
        plan = TritonAttentionPlan(
            self.shape,
            self.kv_cache,
            paged_batch(metadata),
            metadata.slot_mapping,
            self._output(metadata.slot_mapping.shape[0]) if metadata.has_padding else None,
            splits,
            self._room(splits, metadata.num_reqs),
            self._new_tiles(metadata.num_reqs, metadata.num_actual_tokens) if any(n > limit for n in lens) else None,
            self._tile_size,
        )
        plan.plan_tiles()
        return plan

    @torch.inference_mode(False)
    def init_graph_buffers(self, limits: GraphLimits) -> None:
        """See `AttentionBackend`. Plans captured earlier keep the buffers that they were captured with."""
        tiles = self._new_tiles(limits.max_reqs, limits.max_tokens)
        self._static = StaticTensors(
            limits, self.kv_cache, self.traits.seq_len_fill, self._output(limits.max_tokens), tiles
        )

    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> TritonGraphPlan:
        """See `AttentionBackend`. The graph of a decode or verify batch fixes the number of tokens per request."""
        static, num_reqs, num_tokens = self.checked_static(metadata), metadata.num_reqs, metadata.slot_mapping.shape[0]
        limit = self._max_decode_queries(metadata)
        longest = max(1, metadata.max_query_len)
        splits = self._splits(num_reqs, longest if longest <= limit else 1, static.buffers.limits.max_seq_len)
        tiles = None
        if static.tiles is not None and (longest > limit or MODES[metadata.mode].split is not SplitKind.FIXED):
            tiles = static.tiles[: num_tiles(num_reqs, num_tokens, self._tile_size.queries(self.shape))]
        plan = TritonGraphPlan(
            self.shape,
            self.kv_cache,
            static.batch(num_reqs, with_tree=tree_of(metadata) is not None),
            static.buffers.slot_mapping[:num_tokens],
            static.output,
            splits,
            self._room(splits, num_reqs),
            tiles,
            self._tile_size,
            static,
        )
        plan.replan(metadata)
        return plan

    def _max_decode_queries(self, metadata: CommonAttentionMetadata) -> int:
        """The most queries of a request that the decode kernel takes; 1 in a batch with prompts. The kernel keeps
        partial results for this many queries of *every* request, so a large number would cost memory."""
        if MODES[metadata.mode].kernel is not Kernel.DECODE:
            return 1
        return max(1, _MAX_DECODE_ROWS // self.shape.group_size)

    @cached_property
    def _tile_size(self) -> TileSize:
        return tune_prefill(self.shape, self.kv_cache)

    def _splits(self, num_reqs: int, max_queries: int, max_seq_len: int) -> DecodeSplits:
        choice = tune_decode(self.shape, self.kv_cache, num_reqs, max_queries, max_seq_len, self._processors)
        programs, tile = choice.waves * self._processors, choice.tile(self.shape, max_queries)
        return DecodeSplits.choose(self.shape, num_reqs, max_queries, max_seq_len, programs, tile)

    def _room(self, splits: DecodeSplits | None, num_reqs: int) -> Tensor:
        return self._workspace.room(0 if splits is None else splits.workspace_numbers(self.shape, num_reqs))

    def _output(self, rows: int) -> PaddedOutput:
        return PaddedOutput(rows, self.shape.num_heads, self.shape.value_dim, self.kv_cache)

    def _new_tiles(self, num_reqs: int, num_tokens: int) -> Tensor:
        places = num_tiles(num_reqs, num_tokens, self._tile_size.queries(self.shape))
        return torch.zeros(places, 2, dtype=torch.int32, device=self.kv_cache.device)
