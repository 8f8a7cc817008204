"""Shared by the back ends on this project's Triton kernels: the device, workspaces, static tensors, and trees."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention.backends.store import FP8_CAPABILITY
from attention.graph_buffers import GraphBuffers
from attention.interface import GraphLimits
from attention.kernels.attend import plan_mask_offsets
from attention.kernels.tile import PagedBatch, TreeMask
from attention.kv_cache import MLAKVCache, PagedKVCache
from attention.metadata import CommonAttentionMetadata, SpecVerifyInput
from ubatch import ConfigError
from ubatch.kernels.triton_jit import INTERPRETED

DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)
"""Device types that the kernels run on."""

_INTERPRETED_PROCESSORS = 8  # assumed in the interpreter: enough to split keys at all


class TritonBackend:
    """The base of the back ends on this project's kernels.

    Raises:
        ConfigError: the cache is fp8, and the GPU is too old for that.
    """

    name: ClassVar[str]

    def __init__(self, shape: Any, kv_cache: Any) -> None:
        self.shape = shape
        self.kv_cache = kv_cache
        self._processors = _processors(self.name, kv_cache)
        self._workspace = Workspace(kv_cache.device)
        self._static: StaticTensors | None = None

    @property
    def nbytes(self) -> int:
        return self._workspace.nbytes + (0 if self._static is None else self._static.nbytes)

    def replan(self, plan: Any, metadata: CommonAttentionMetadata) -> None:
        plan.replan(metadata)

    def checked_static(self, metadata: CommonAttentionMetadata) -> StaticTensors:
        """The static tensors; `ConfigError` if there are none, or this batch does not fit."""
        if self._static is None:
            raise ConfigError(
                f"the {self.name} back end has no graph buffers; call init_graph_buffers before capturing."
            )
        self._static.buffers.check(metadata, metadata.num_reqs, metadata.slot_mapping.shape[0])
        return self._static


def _processors(name: str, kv_cache: PagedKVCache | MLAKVCache) -> int:
    """Number of multiprocessors of the cache's device."""
    if kv_cache.device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    properties = torch.cuda.get_device_properties(kv_cache.device)
    if kv_cache.spec.fp8 and (properties.major, properties.minor) < FP8_CAPABILITY:
        raise ConfigError(
            f"the {name} back end reads an fp8 cache on GPUs of compute capability 8.9 and newer; "
            f"{properties.name} has {properties.major}.{properties.minor}. Use an unquantised cache."
        )
    return properties.multi_processor_count


def paged_batch(metadata: CommonAttentionMetadata) -> PagedBatch:
    """A step's batch in the form that kernels read; nothing is copied from the host."""
    table = metadata.block_table
    return PagedBatch(
        metadata.num_reqs,
        metadata.query_start_loc,
        metadata.seq_lens,
        table if table.stride(-1) == 1 else table.contiguous(),
        _tree_mask(metadata),
    )


def refuse_other_batch(metadata: CommonAttentionMetadata, batch: PagedBatch, max_queries: int | None) -> None:
    """Refuse a batch of another kind than a captured graph runs; its buffers refuse one that is too large.

    Args:
        max_queries: most queries of a request in the captured batch; None for any number.

    Raises:
        ConfigError: longer queries, a tree where none was captured, or none where one was.
    """
    if max_queries is not None and metadata.max_query_len > max_queries:
        raise ConfigError(
            f"a graph captured with {max_queries} tokens per request cannot run a batch with "
            f"{metadata.max_query_len}; capture one for that."
        )
    tree = tree_of(metadata)
    if metadata.num_actual_tokens and (tree is None) != (batch.tree is None):
        raise ConfigError(
            f"a graph captured {'without' if batch.tree is None else 'with'} a tree mask cannot run a batch "
            f"{'without' if tree is None else 'with'} one; capture one for that."
        )


class Workspace:
    """Float32 scratch memory that grows when a plan needs more. A plan keeps its tensor, so a captured plan's stays."""

    def __init__(self, device: torch.device) -> None:
        self._newest = torch.zeros(0, device=device)
        self._alive: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of the current tensor, and of smaller ones that plans still hold."""
        return sum(tensor.nbytes for tensor in self._alive.values())

    def room(self, numbers: int) -> Tensor:
        """At least `numbers` elements; zero when allocated, later as the kernels left them."""
        if self._newest.numel() < numbers:
            self._newest = torch.zeros(numbers, dtype=torch.float32, device=self._newest.device)
            self._alive[id(self._newest)] = self._newest
        return self._newest


class PaddedOutput:
    """Attention's output where some tokens belong to no request: one tensor for all layers of a lane, which reads a
    layer's output before it writes the next one. No kernel writes the rows of those tokens, so they stay 0.

    Args:
        rows: how many tokens there can be.
        heads, dim: of the output.

    Attributes:
        memory: `[rows, heads, dim]`, in the cache's dtype.
    """

    @torch.inference_mode(False)  # `clear` may run outside of it
    def __init__(self, rows: int, heads: int, dim: int, cache: PagedKVCache | MLAKVCache) -> None:
        self.memory = torch.zeros(rows, heads, dim, dtype=cache.spec.dtype, device=cache.device)

    def clear(self, start: int, stop: int) -> None:
        """Make rows of an earlier batch rows of padding."""
        if start < stop:
            self.memory[start:stop].zero_()


class StaticTensors:
    """The tensors that captured plans read, at fixed addresses: the batch, the tiles, and a tree if one is captured."""

    def __init__(
        self,
        limits: GraphLimits,
        cache: PagedKVCache | MLAKVCache,
        fill: int,
        output: PaddedOutput,
        tiles: Tensor | None = None,
    ) -> None:
        self.buffers = GraphBuffers(
            limits, cache.spec.block_size, cache.device, hidden_slot=cache.hidden_slot, seq_len_fill=fill
        )
        self.output = output
        self.tiles = tiles
        self._tree: TreeMask | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tree = () if self._tree is None else (self._tree.mask, self._tree.offsets, self._tree.positions)
        tiles = () if self.tiles is None else (self.tiles,)
        return self.buffers.nbytes + self.output.memory.nbytes + sum(tensor.nbytes for tensor in (*tiles, *tree))

    def batch(self, num_reqs: int, *, with_tree: bool) -> PagedBatch:
        """The batch that was copied in, in the form that kernels read."""
        buffers = self.buffers
        batch = PagedBatch(num_reqs, buffers.query_start_loc, buffers.seq_lens, buffers.block_table)
        return replace(batch, tree=self._make_tree()) if with_tree else batch

    @torch.inference_mode(False)
    def _make_tree(self) -> TreeMask:
        """Allocated when the first plan with a tree is captured: a mask row of full length for every token is large."""
        if self._tree is None:
            limits, device = self.buffers.limits, self.buffers.seq_lens.device
            self._tree = TreeMask(
                mask=torch.zeros(limits.max_tokens * limits.max_seq_len, dtype=torch.uint8, device=device),
                offsets=torch.zeros(limits.max_reqs, dtype=torch.int64, device=device),
                positions=torch.zeros(limits.max_tokens, dtype=torch.int64, device=device),
            )
        return self._tree

    def fill(self, metadata: CommonAttentionMetadata, num_reqs: int, num_tokens: int) -> None:
        """Copy a batch in, and its tree if it has one; see `GraphBuffers.fill`."""
        self.buffers.fill(metadata, num_reqs, num_tokens)
        self.output.clear(metadata.num_actual_tokens, num_tokens)
        tree = tree_of(metadata)
        if tree is not None:
            self._fill_tree(tree, num_reqs)

    def _fill_tree(self, tree: SpecVerifyInput, num_reqs: int) -> None:
        static = self._make_tree()
        if tree.custom_mask is not None:
            static.mask[: tree.custom_mask.numel()].copy_(tree.custom_mask.view(torch.uint8))
        static.positions[: tree.positions.numel()].copy_(tree.positions)
        plan_mask_offsets(static.offsets, self.buffers.seq_lens, num_reqs, tree.num_draft_tokens)


def tree_of(metadata: CommonAttentionMetadata) -> SpecVerifyInput | None:
    """The drafts' tree; None for a chain, which is causal attention."""
    tree = metadata.spec_verify
    return None if tree is None or tree.custom_mask is None else tree


def _tree_mask(metadata: CommonAttentionMetadata) -> TreeMask | None:
    """The drafts' tree in the form that kernels read; None for a chain."""
    tree = tree_of(metadata)
    if tree is None or tree.custom_mask is None:
        return None
    offsets = torch.zeros(metadata.num_reqs, dtype=torch.int64, device=tree.custom_mask.device)
    plan_mask_offsets(offsets, metadata.seq_lens, metadata.num_reqs, tree.num_draft_tokens)
    return TreeMask(tree.custom_mask.view(torch.uint8), offsets, tree.positions)
