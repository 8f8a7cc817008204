"""An attention back end that can be captured and is fast on a CPU: plain torch over static tensors.

Prefills run as in `torch`. Decode and verify batches gather every request's whole row of the table, as many blocks as
the longest sequence may have, and mask: nothing is read on the host, so a graph replays it for any lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from attention import AttentionShape, CommonAttentionMetadata, GraphLimits, PagedKVCache, register_attention_backend
from attention.backends.torch_sdpa import TorchAttentionBackend
from attention.graph_buffers import GraphBuffers

NAME = "static_torch"


@dataclass(frozen=True)
class StaticPlan:
    """A batch of requests with equally many queries, at addresses that stay."""

    shape: AttentionShape
    kv_cache: PagedKVCache
    seq_lens: Tensor
    block_table: Tensor
    slots: Tensor
    buffers: GraphBuffers

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionPlan`."""
        self.kv_cache.write(layer, k, v, self.slots)
        requests, queries = self.seq_lens.shape[0], q.shape[0] // self.seq_lens.shape[0]
        table = self.block_table.long()
        keys, values = (
            blocks[table].flatten(1, 2) for blocks in (self.kv_cache.keys(layer), self.kv_cache.values(layer))
        )
        place = torch.arange(keys.shape[1], device=q.device)
        last = self.seq_lens[:, None] - queries + torch.arange(queries, device=q.device)  # [R, Q], what a query sees
        visible = (place <= last[:, :, None])[:, None, None]
        rows = q.view(requests, queries, self.shape.num_kv_heads, self.shape.group_size, -1).permute(0, 2, 3, 1, 4)
        scores = rows @ keys.permute(0, 2, 3, 1)[:, :, None] * self.shape.softmax_scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0)  # padding may see nothing
        out = (weights @ values.permute(0, 2, 1, 3)[:, :, None]).permute(0, 3, 1, 2, 4).reshape(q.shape)
        return out.masked_fill((self.slots == self.kv_cache.hidden_slot)[:, None, None], 0)


class StaticAttention(TorchAttentionBackend):
    """See the module."""

    name: ClassVar[str] = NAME
    traits: ClassVar = replace(TorchAttentionBackend.traits, graphs=True)
    buffers: GraphBuffers | None = None

    def init_graph_buffers(self, limits: GraphLimits) -> None:
        """See `AttentionBackend`."""
        cache = self.kv_cache
        self.buffers = GraphBuffers(limits, cache.spec.block_size, cache.device, hidden_slot=cache.hidden_slot)

    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> StaticPlan:
        """See `AttentionBackend`."""
        assert self.buffers is not None
        requests, buffers = metadata.num_reqs, self.buffers
        plan = StaticPlan(
            self.shape,
            self.kv_cache,
            buffers.seq_lens[:requests],
            buffers.block_table[:requests],
            buffers.slot_mapping[: metadata.slot_mapping.shape[0]],
            buffers,
        )
        self.replan(plan, metadata)
        return plan

    def replan(self, plan: StaticPlan, metadata: CommonAttentionMetadata) -> None:
        """See `AttentionBackend`."""
        plan.buffers.fill(metadata, plan.seq_lens.shape[0], plan.slots.shape[0])


def register() -> None:
    """Make it known as `static_torch`."""
    register_attention_backend(NAME, "static_attention:StaticAttention")
