"""The `triton` back end: this project's own kernels, on any GPU that Triton compiles for.

    write       the step's keys and values go to the cache, one program per token
    decode      requests with few queries: keys split over programs, then reduced
    prefill     requests with more: tiles of queries over the cache

A plan launches what its batch has: decodes and prompts in one batch launch both, and each leaves the other's requests
alone. What the kernels need to know they work out on the device, from the metadata's tensors, so a captured plan serves
any batch that is copied into the same tensors. A graph freezes only how many programs are launched, and that is chosen
for the longest request its limits allow.

It runs on a CPU, slowly, in Triton's interpreter: set TRITON_INTERPRET=1 before Triton is first imported.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from attention.backends.base import AttentionShape, BackendTraits, GraphLimits
from attention.graph_buffers import GraphBuffers
from attention.kernels.cache import write_kv
from attention.kernels.decode import DecodeSplits, decode_attention
from attention.kernels.planning import num_tiles, plan_mask_offsets, plan_tiles
from attention.kernels.prefill import prefill_attention
from attention.kernels.tile import PagedBatch, TileSize, TreeMask
from attention.kv_cache import PagedKVCache
from attention.metadata import CommonAttentionMetadata
from attention.modes import MODES, Kernel, SplitKind
from attention.spec_verify import SpecVerifyInput
from ubatch import ConfigError
from ubatch.triton_jit import INTERPRETED

__all__ = ["TritonAttentionBackend", "TritonAttentionPlan", "TritonGraphPlan"]

_MAX_DECODE_ROWS = 128  # queries times heads of a group in one tile of the decode kernel
_PROGRAMS_PER_PROCESSOR = 2  # that a decode launches at least, as long as its keys can be split
_INTERPRETED_PROGRAMS = 16  # the same where there are no processors: enough to split at all
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class TritonAttentionPlan:
    """What to launch for one step of one lane.

    Attributes:
        shape: of the attention.
        kv_cache: of the model.
        batch: the step's, on the device.
        slots: `[T]` int64, where its tokens' keys and values go.
        has_padding: whether there are tokens that belong to no request.
        splits: how requests with few queries are cut; None if there are none.
        workspace: for their partial results; empty if there are none.
        tiles: of the requests with more queries; None if there are none.
        tile_size: of those tiles.
    """

    shape: AttentionShape
    kv_cache: PagedKVCache
    batch: PagedBatch
    slots: Tensor
    has_padding: bool
    splits: DecodeSplits | None
    workspace: Tensor
    tiles: Tensor | None
    tile_size: TileSize

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionPlan.forward`.

        Raises:
            ConfigError: another number of tokens than was planned for, or sinks where the shape has none, or none where
                it has.
        """
        if q.shape[0] != self.slots.shape[0]:
            raise ConfigError(f"attention was planned for {self.slots.shape[0]} tokens and got {q.shape[0]}.")
        self.shape.check_sinks(sinks)
        write_kv(self.kv_cache, layer, k, v, self.slots)
        out = (torch.zeros if self.has_padding else torch.empty)(q.shape, dtype=q.dtype, device=q.device)
        where = (self.shape, self.kv_cache, layer, self.batch)
        if self.splits is not None:
            decode_attention(q, out, *where, self.splits, self.workspace, sinks)
        if self.tiles is not None:
            prefill_attention(q, out, *where, self.tiles, self.tile_size, sinks)
        return out

    def plan_tiles(self) -> None:
        """Give the tiles to the batch's requests, on the device."""
        if self.tiles is not None:
            decoded = 0 if self.splits is None else self.splits.max_queries
            queries = self.tile_size.queries(self.shape)
            plan_tiles(self.tiles, self.batch.query_start_loc, self.batch.num_reqs, queries, min_queries=decoded + 1)


@dataclass(frozen=True)
class TritonGraphPlan(TritonAttentionPlan):
    """A plan whose tensors are static.

    Attributes:
        static: the tensors.
    """

    static: _StaticTensors

    def replan(self, metadata: CommonAttentionMetadata) -> None:
        """Describe another batch; see `AttentionBackend.replan`."""
        num_reqs, num_tokens = self.batch.num_reqs, self.slots.shape[0]
        if (metadata.num_reqs, metadata.slot_mapping.shape[0]) != (num_reqs, num_tokens):
            raise ConfigError(
                f"a graph of {num_reqs} requests and {num_tokens} tokens cannot run a batch of {metadata.num_reqs} and "
                f"{metadata.slot_mapping.shape[0]}; pad the batch, or choose another graph."
            )
        if self.tiles is None and self.splits is not None and metadata.max_query_len > self.splits.max_queries:
            raise ConfigError(
                f"a graph captured with {self.splits.max_queries} tokens per request cannot run a batch with "
                f"{metadata.max_query_len}; capture one for that."
            )
        tree = _tree_of(metadata)
        if metadata.num_actual_tokens and (tree is None) != (self.batch.tree is None):
            raise ConfigError(
                f"a graph captured {'without' if self.batch.tree is None else 'with'} a tree mask cannot run a batch "
                f"{'without' if tree is None else 'with'} one; capture one for that."
            )
        self.static.buffers.fill(metadata, num_reqs, num_tokens)
        if tree is not None:
            self.static.fill_tree(tree, num_reqs)
        self.plan_tiles()


class TritonAttentionBackend:
    """Plans attention with this project's Triton kernels over a paged cache.

    Raises:
        ConfigError: the cache is fp8, and the GPU is too old for that.
    """

    name: ClassVar[str] = "triton"
    traits: ClassVar[BackendTraits] = BackendTraits(
        devices=("cuda", "cpu") if INTERPRETED else ("cuda",),
        sliding_window=True,
        soft_cap=True,
        sinks=True,
        tree_mask=True,
        fp8=True,
        graphs=True,
    )

    def __init__(self, shape: AttentionShape, kv_cache: PagedKVCache) -> None:
        self.shape = shape
        self.kv_cache = kv_cache
        self._num_programs = _INTERPRETED_PROGRAMS
        if kv_cache.device.type == "cuda":
            properties = torch.cuda.get_device_properties(kv_cache.device)
            self._num_programs = _PROGRAMS_PER_PROCESSOR * properties.multi_processor_count
            if kv_cache.spec.fp8 and (properties.major, properties.minor) < _FP8_CAPABILITY:
                raise ConfigError(
                    f"the triton back end reads an fp8 cache on GPUs of compute capability 8.9 and newer; "
                    f"{properties.name} has {properties.major}.{properties.minor}. Use an unquantised cache."
                )
        self._tile_size = TileSize.prefill(shape, kv_cache.spec.dtype)
        self._workspace = _Workspace(kv_cache.device)
        self._static: _StaticTensors | None = None

    @property
    def nbytes(self) -> int:
        """See `AttentionBackend`."""
        return self._workspace.nbytes + (0 if self._static is None else self._static.nbytes)

    def plan(self, metadata: CommonAttentionMetadata) -> TritonAttentionPlan:
        """See `AttentionBackend`. Nothing waits for the device, and nothing is copied to it."""
        lens = {length for length in metadata.query_lens_cpu if length}
        limit = self._max_decode_queries(metadata)
        decoded = max((length for length in lens if length <= limit), default=0)
        splits = self._splits(metadata.num_reqs, decoded, metadata.max_seq_len) if decoded else None
        table = metadata.block_table
        plan = TritonAttentionPlan(
            self.shape,
            self.kv_cache,
            PagedBatch(
                metadata.num_reqs,
                metadata.query_start_loc,
                metadata.seq_lens,
                table if table.stride(-1) == 1 else table.contiguous(),
                _tree_mask(metadata),
            ),
            metadata.slot_mapping,
            metadata.slot_mapping.shape[0] > metadata.num_actual_tokens,
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
        self._static = _StaticTensors(limits, self.kv_cache, self._new_tiles(limits.max_reqs, limits.max_tokens))

    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> TritonGraphPlan:
        """See `AttentionBackend`. A decode or verify batch freezes how many tokens each request has."""
        if self._static is None:
            raise ConfigError("the triton back end has no graph buffers; call init_graph_buffers before capturing.")
        static, num_reqs, num_tokens = self._static, metadata.num_reqs, metadata.slot_mapping.shape[0]
        static.buffers.check(metadata, num_reqs, num_tokens)
        limit = self._max_decode_queries(metadata)
        longest = max(1, metadata.max_query_len)
        splits = self._splits(num_reqs, longest if longest <= limit else 1, static.buffers.limits.max_seq_len)
        tiles = None
        if longest > limit or MODES[metadata.mode].split is not SplitKind.FIXED:
            tiles = static.tiles[: num_tiles(num_reqs, num_tokens, self._tile_size.queries(self.shape))]
        plan = TritonGraphPlan(
            self.shape,
            self.kv_cache,
            static.batch(num_reqs, with_tree=_tree_of(metadata) is not None),
            static.buffers.slot_mapping[:num_tokens],
            True,
            splits,
            self._room(splits, num_reqs),
            tiles,
            self._tile_size,
            static,
        )
        plan.replan(metadata)
        return plan

    def replan(self, plan: TritonGraphPlan, metadata: CommonAttentionMetadata) -> None:
        """See `AttentionBackend`."""
        plan.replan(metadata)

    def _max_decode_queries(self, metadata: CommonAttentionMetadata) -> int:
        """The most queries of a request that the decode kernel takes. In a batch with prompts 1: its partial results
        are kept for as many queries of *every* request as the longest of its requests has."""
        if MODES[metadata.mode].kernel is not Kernel.DECODE:
            return 1
        return max(1, _MAX_DECODE_ROWS // self.shape.group_size)

    def _splits(self, num_reqs: int, max_queries: int, max_seq_len: int) -> DecodeSplits:
        return DecodeSplits.choose(self.shape, num_reqs, max_queries, max_seq_len, self._num_programs)

    def _room(self, splits: DecodeSplits | None, num_reqs: int) -> Tensor:
        return self._workspace.room(0 if splits is None else splits.workspace_numbers(self.shape, num_reqs))

    def _new_tiles(self, num_reqs: int, num_tokens: int) -> Tensor:
        places = num_tiles(num_reqs, num_tokens, self._tile_size.queries(self.shape))
        return torch.zeros(places, 2, dtype=torch.int32, device=self.kv_cache.device)


class _Workspace:
    """Float32 room that grows when a plan needs more. A plan keeps what it was given, so a captured one never moves."""

    def __init__(self, device: torch.device) -> None:
        self._newest = torch.zeros(0, device=device)
        self._alive: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of what is given out next, and of smaller ones that plans still hold."""
        return sum(tensor.nbytes for tensor in self._alive.values())

    def room(self, numbers: int) -> Tensor:
        """At least so many numbers; zero when made, then whatever the kernels left."""
        if self._newest.numel() < numbers:
            self._newest = torch.zeros(numbers, dtype=torch.float32, device=self._newest.device)
            self._alive[id(self._newest)] = self._newest
        return self._newest


class _StaticTensors:
    """What captured plans read, at addresses that never move: the batch, the tiles, and a tree if one is captured."""

    def __init__(self, limits: GraphLimits, cache: PagedKVCache, tiles: Tensor) -> None:
        fill = TritonAttentionBackend.traits.seq_len_fill
        self.buffers = GraphBuffers(
            limits, cache.spec.block_size, cache.device, hidden_slot=cache.hidden_slot, seq_len_fill=fill
        )
        self.tiles = tiles
        self._tree: TreeMask | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        tree = () if self._tree is None else (self._tree.mask, self._tree.offsets, self._tree.positions)
        return self.buffers.nbytes + sum(tensor.nbytes for tensor in (self.tiles, *tree))

    def batch(self, num_reqs: int, *, with_tree: bool) -> PagedBatch:
        """The batch that is copied in, as kernels read it."""
        buffers = self.buffers
        batch = PagedBatch(num_reqs, buffers.query_start_loc, buffers.seq_lens, buffers.block_table)
        return replace(batch, tree=self._make_tree()) if with_tree else batch

    @torch.inference_mode(False)
    def _make_tree(self) -> TreeMask:
        """Made when the first plan with a tree is captured: a mask for every token at the greatest length is large."""
        if self._tree is None:
            limits, device = self.buffers.limits, self.tiles.device
            self._tree = TreeMask(
                mask=torch.zeros(limits.max_tokens * limits.max_seq_len, dtype=torch.uint8, device=device),
                offsets=torch.zeros(limits.max_reqs, dtype=torch.int64, device=device),
                positions=torch.zeros(limits.max_tokens, dtype=torch.int64, device=device),
            )
        return self._tree

    def fill_tree(self, tree: SpecVerifyInput, num_reqs: int) -> None:
        """Copy a tree in, after its batch."""
        static = self._make_tree()
        if tree.custom_mask is not None:
            static.mask[: tree.custom_mask.numel()].copy_(tree.custom_mask.view(torch.uint8))
        static.positions[: tree.positions.numel()].copy_(tree.positions)
        plan_mask_offsets(static.offsets, self.buffers.seq_lens, num_reqs, tree.num_draft_tokens)


def _tree_of(metadata: CommonAttentionMetadata) -> SpecVerifyInput | None:
    """The drafts' tree; None for a chain, which is causal attention."""
    tree = metadata.spec_verify
    return None if tree is None or tree.custom_mask is None else tree


def _tree_mask(metadata: CommonAttentionMetadata) -> TreeMask | None:
    """The same, as kernels read it."""
    tree = _tree_of(metadata)
    if tree is None or tree.custom_mask is None:
        return None
    offsets = torch.zeros(metadata.num_reqs, dtype=torch.int64, device=tree.custom_mask.device)
    plan_mask_offsets(offsets, metadata.seq_lens, metadata.num_reqs, tree.num_draft_tokens)
    return TreeMask(tree.custom_mask.view(torch.uint8), offsets, tree.positions)
