"""An attention back end that can be captured and is fast on a CPU: plain torch over static tensors.

Prefills run as in `torch`. Of the other batches every row gathers its request's whole row of the table, as many blocks
as the longest sequence may have, and masks: nothing is read on the host, so a graph replays it for any lengths, for
requests of different lengths, and for trees of drafts.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attention import (
    AttentionShape,
    BackendTraits,
    CommonAttentionMetadata,
    GraphLimits,
    PagedKVCache,
    register_attention_backend,
)
from attention.backends.torch.sdpa import TorchAttentionBackend
from attention.graph_buffers import GraphBuffers
from ubatch import ConfigError

NAME = "static_torch"


@dataclass(frozen=True)
class StaticPlan:
    """A batch of requests with few queries, at addresses that stay.

    Attributes:
        requests, rows: of the graph.
        mask: of trees of drafts, flat as in `SpecVerifyInput`; None where there are none.
    """

    shape: AttentionShape
    kv_cache: PagedKVCache
    requests: int
    rows: int
    buffers: GraphBuffers
    mask: Tensor | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionPlan`."""
        buffers, count = self.buffers, self.requests
        slots = buffers.slot_mapping[: self.rows]
        self.kv_cache.write(layer, k, v, slots)
        starts, ends = buffers.query_start_loc[:count], buffers.query_start_loc[1 : count + 1]
        row = torch.arange(self.rows, dtype=torch.int32, device=q.device)
        owner = torch.searchsorted(ends, row, right=True).clamp(max=count - 1)
        number = row - starts[owner]  # of the query in its request
        lens, queries = buffers.seq_lens[owner], (ends - starts)[owner]
        table = buffers.block_table[owner].long()
        keys, values = (
            blocks[table].flatten(1, 2) for blocks in (self.kv_cache.keys(layer), self.kv_cache.values(layer))
        )
        place = torch.arange(keys.shape[1], device=q.device)
        visible = place <= (lens - queries + number)[:, None]
        if self.mask is not None:
            sizes = buffers.seq_lens[:count] * (ends - starts)
            first = (sizes.cumsum(0) - sizes)[owner] + number * lens
            entry = (first[:, None] + place).clamp(0, self.mask.shape[0] - 1)
            visible = (place < lens[:, None]) & self.mask[entry]
        values = values.masked_fill((place >= lens[:, None])[:, :, None, None], 0)
        heads = q.view(self.rows, self.shape.num_kv_heads, self.shape.group_size, -1)
        scores = torch.einsum("tkgd,tskd->tkgs", heads, keys) * self.shape.softmax_scale
        # Padding may see nothing.
        weights = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        out = torch.einsum("tkgs,tskd->tkgd", weights, values).reshape(q.shape)
        return out.masked_fill((slots == self.kv_cache.hidden_slot)[:, None, None], 0)


class StaticAttention(TorchAttentionBackend):
    """See the module."""

    name: ClassVar[str] = NAME
    traits: ClassVar = BackendTraits(devices=("cpu", "cuda"), tree_mask=True, graphs=True)
    buffers: GraphBuffers | None = None
    mask: Tensor | None = None

    @torch.inference_mode(False)
    def init_graph_buffers(self, limits: GraphLimits) -> None:
        """See `AttentionBackend`."""
        cache = self.kv_cache
        self.buffers = GraphBuffers(limits, cache.spec.block_size, cache.device, hidden_slot=cache.hidden_slot)
        self.mask = torch.zeros(limits.max_tokens * limits.max_seq_len, dtype=torch.bool, device=cache.device)

    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> StaticPlan:
        """See `AttentionBackend`."""
        if self.buffers is None:
            raise ConfigError("static_torch has no graph buffers; call init_graph_buffers before a capture.")
        size = metadata.num_reqs, metadata.slot_mapping.shape[0]
        mask = self.mask if metadata.has_tree else None
        plan = StaticPlan(self.shape, self.kv_cache, *size, self.buffers, mask)
        self.replan(plan, metadata)
        return plan

    def replan(self, plan: StaticPlan, metadata: CommonAttentionMetadata) -> None:
        """See `AttentionBackend`."""
        if metadata.num_actual_tokens and metadata.has_tree is (plan.mask is None):
            raise ConfigError("static_torch captured a graph without a tree mask, or with one; capture both.")
        plan.buffers.fill(metadata, plan.requests, plan.rows)
        if plan.mask is not None and metadata.spec_verify is not None:
            shown = metadata.spec_verify.custom_mask
            assert shown is not None
            plan.mask[: shown.shape[0]].copy_(shown)


def register() -> None:
    """Make it known as `static_torch`."""
    register_attention_backend(NAME, "static_attention:StaticAttention")
