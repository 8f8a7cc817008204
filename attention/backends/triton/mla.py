"""The `triton_mla` back end: multi-head latent attention; requests with few queries run on this project's kernels.

    write       one program per token rotates its key part and stores it next to its latent
    absorbed    requests with few queries attend to the cached latents: split over programs, then reduced
    expanded    prompts attend over keys and values, with the code of `torch_mla`

Decode, verify and draft-extend batches are absorbed as a whole, and can be captured: lengths and tables are read on the
device, so a captured plan runs any batch that is copied into the same tensors. In a batch with prompts the requests
that decode are absorbed, and the others are expanded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from attention.backends.flashinfer_kernels import RequestBatch, absorb, project_latents, rows_of
from attention.backends.torch.groups import Request, list_requests
from attention.backends.torch.groups import Workspace as GatherWorkspace
from attention.backends.torch.mla import ExpandedGroup, LatentStep, expanded_groups
from attention.backends.triton.common import (
    DEVICES,
    PaddedOutput,
    StaticTensors,
    TritonBackend,
    paged_batch,
    refuse_other_batch,
    tree_of,
)
from attention.interface import BackendTraits, GraphLimits, MLAInputs, MLAShape, RopeTable
from attention.kernels.decode import DecodeSplits
from attention.kernels.latent import LatentTile, as_attention, latent_decode, write_latent
from attention.kernels.tile import PagedBatch
from attention.kernels.tuning import tune_latent_decode
from attention.kv_cache import MLAKVCache
from attention.metadata import CommonAttentionMetadata
from attention.modes import MODES, Kernel
from ubatch import ConfigError


@dataclass(frozen=True)
class _Absorbed:
    """Requests that attend to latents.

    Attributes:
        rows: the rows of their tokens in the step.
        batch: these requests only, on the device.
        output: where the latents are written if some of their rows belong to no request; else None.
    """

    rows: slice | Tensor
    batch: PagedBatch
    splits: DecodeSplits
    tile: LatentTile
    workspace: Tensor
    output: PaddedOutput | None

    def attend(self, shape: MLAShape, cache: MLAKVCache, inputs: MLAInputs, layer: int) -> Tensor:
        """`[n, num_heads, v_head_dim]`; rows of padding are 0."""
        q = absorb(inputs.q_nope[self.rows], inputs.w_uk)
        rope = inputs.rope
        if self.rows != slice(0, inputs.q_nope.shape[0]):
            rope = RopeTable(rope.cos_sin, rope.positions[self.rows], rope.interleaved)
        latents = q.new_empty(q.shape) if self.output is None else self.output.memory[: q.shape[0]]
        where = (shape, cache, layer, self.batch, self.splits, self.tile, self.workspace)
        latent_decode(q, inputs.q_rope[self.rows], rope, latents, *where)
        return project_latents(latents, inputs.w_uv)


@dataclass(frozen=True)
class TritonMLAPlan:
    """The kernel launches for one step of one lane.

    Attributes:
        slots: `[T]` int64, the slots of its tokens' latents.
        absorbed: requests with few queries; None if there are none.
        expanded: the other requests, in groups.
    """

    shape: MLAShape
    kv_cache: MLAKVCache
    slots: Tensor
    absorbed: _Absorbed | None
    expanded: tuple[ExpandedGroup, ...]
    step: LatentStep | None

    def forward(self, inputs: MLAInputs, layer: int) -> Tensor:
        """See `MLAPlan.forward`.

        Raises:
            ConfigError: the number of tokens differs from the plan's.
        """
        tokens = inputs.q_nope.shape[0]
        if tokens != self.slots.shape[0]:
            raise ConfigError(f"attention was planned for {self.slots.shape[0]} tokens and got {tokens}.")
        write_latent(self.kv_cache, layer, inputs.latent, inputs.k_rope, inputs.rope, self.slots)
        own = None
        if self.absorbed is not None:
            own = self.absorbed.attend(self.shape, self.kv_cache, inputs, layer)
            if own.shape[0] == tokens:
                return own
        out = inputs.q_nope.new_zeros(tokens, self.shape.num_heads, self.shape.v_head_dim)
        if self.absorbed is not None and own is not None:
            out[self.absorbed.rows] = own
        if self.step is not None and self.expanded:
            rope = inputs.rope
            rotated = replace(inputs, q_rope=rope.rotate(inputs.q_rope), k_rope=rope.rotate(inputs.k_rope))
            for group in self.expanded:
                out[group.tokens.rows] = group.attend(self.step, rotated, layer)
        return out


@dataclass(frozen=True)
class TritonMLAGraphPlan(TritonMLAPlan):
    """A plan whose tensors are static.

    Attributes:
        captured: the requests, all of them.
    """

    captured: _Absorbed
    static: StaticTensors

    def replan(self, metadata: CommonAttentionMetadata) -> None:
        """Describe another batch; see `AttentionBackend.replan`."""
        batch, num_tokens = self.captured.batch, self.slots.shape[0]
        refuse_other_batch(metadata, batch, self.captured.splits.max_queries)
        self.static.fill(metadata, batch.num_reqs, num_tokens)


class TritonMLABackend(TritonBackend):
    """Plans latent attention with this project's Triton kernels over a paged cache of latents."""

    name: ClassVar[str] = "triton_mla"
    traits: ClassVar[BackendTraits] = BackendTraits(
        mha=False, mla=True, devices=DEVICES, tree_mask=True, fp8=True, graphs=True
    )

    shape: MLAShape
    kv_cache: MLAKVCache

    def __init__(self, shape: MLAShape, kv_cache: MLAKVCache) -> None:
        super().__init__(shape, kv_cache)
        self._gathered = GatherWorkspace(kv_cache.spec.storage_dtype, kv_cache.device)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._gathered.nbytes

    def plan(self, metadata: CommonAttentionMetadata) -> TritonMLAPlan:
        """See `AttentionBackend`. For a batch without prompts the kernels read the metadata's own tensors."""
        requests = list_requests(metadata, self.kv_cache.spec)
        whole = MODES[metadata.mode].kernel is Kernel.DECODE or metadata.has_tree
        few = [request for request in requests if whole or _decodes(request)]
        prompts = [request for request in requests if not (whole or _decodes(request))]
        absorbed, step = None, None
        if few and not prompts:
            absorbed = self._absorb_all(metadata)
        elif few:
            absorbed = self._absorb(metadata, requests, few)
        if prompts:
            step = LatentStep(self.shape, self.kv_cache, metadata, self._gathered)
        groups = () if step is None else tuple(expanded_groups(step, prompts))
        return TritonMLAPlan(self.shape, self.kv_cache, metadata.slot_mapping, absorbed, groups, step)

    def init_graph_buffers(self, limits: GraphLimits) -> None:
        """See `AttentionBackend`. Plans captured earlier keep the buffers that they were captured with."""
        with torch.inference_mode(False):
            self._static = StaticTensors(
                limits, self.kv_cache, self.traits.seq_len_fill, self._output(limits.max_tokens)
            )

    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> TritonMLAGraphPlan:
        """See `AttentionBackend`. A graph fixes the largest number of tokens per request.

        Raises:
            ConfigError: no graph buffers, or too small ones; or a batch with prompts.
        """
        if not MODES[metadata.mode].graph:
            raise ConfigError(
                f"attention back end {self.name!r} captures decode, verify and draft-extend batches, not "
                f"{metadata.mode.value}."
            )
        static, num_reqs, num_tokens = self.checked_static(metadata), metadata.num_reqs, metadata.slot_mapping.shape[0]
        batch = static.batch(num_reqs, with_tree=tree_of(metadata) is not None)
        queries, longest = max(1, metadata.max_query_len), static.buffers.limits.max_seq_len
        captured = self._cut(slice(0, num_tokens), batch, queries, longest, static.output)
        slots = static.buffers.slot_mapping[:num_tokens]
        plan = TritonMLAGraphPlan(self.shape, self.kv_cache, slots, captured, (), None, captured, static)
        plan.replan(metadata)
        return plan

    def _absorb_all(self, metadata: CommonAttentionMetadata) -> _Absorbed:
        num_tokens = metadata.slot_mapping.shape[0]
        longest, rows = metadata.max_seq_len, slice(0, num_tokens)
        output = self._output(num_tokens) if metadata.has_padding else None
        return self._cut(rows, paged_batch(metadata), metadata.max_query_len, longest, output)

    def _absorb(self, metadata: CommonAttentionMetadata, requests: list[Request], few: list[Request]) -> _Absorbed:
        """Plan the absorbed part for some of the requests, none of which has a tree."""
        everyone = RequestBatch.of(metadata, self.kv_cache.spec.block_size)
        members = [requests.index(request) for request in few]
        chosen = everyone.select(members)
        rows = rows_of(everyone.query_lens, members, metadata.slot_mapping.device)
        batch = PagedBatch(chosen.num_reqs, chosen.query_start_loc(), chosen.seq_lens, chosen.block_table)
        return self._cut(rows, batch, max(chosen.query_lens), max(chosen.lens), None)

    def _output(self, rows: int) -> PaddedOutput:
        return PaddedOutput(rows, self.shape.num_heads, self.shape.kv_lora_rank, self.kv_cache)

    def _cut(
        self, rows: slice | Tensor, batch: PagedBatch, max_queries: int, longest: int, output: PaddedOutput | None
    ) -> _Absorbed:
        shape = as_attention(self.shape)
        choice = tune_latent_decode(self.shape, self.kv_cache, batch.num_reqs, max_queries, longest, self._processors)
        splits = choice.splits(self.shape, batch.num_reqs, max_queries, longest, self._processors)
        workspace = self._workspace.room(splits.workspace_numbers(shape, batch.num_reqs))
        return _Absorbed(rows, batch, splits, choice, workspace, output)


def _decodes(request: Request) -> bool:
    """Whether a request of a batch with prompts is a decode, which attends to latents."""
    return request.query_len == 1 and request.prefix > 0
