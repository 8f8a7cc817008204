"""One model's attention in lanes: a back end for the whole batch, and a separate one for every lane.

    whole batch     one back end, one plan
    N lanes         N back ends with N plans: lanes run at once, and kernels keep counters in their workspace
    empty lane      no back end: it attends to nothing and writes nothing
    hybrid model    every plan has a part for the layers with linear attention, over the same pool of states

The lanes' back ends are made on the first step that overlaps. Prefill and decode may run on different back ends over
the same cache; a mixed batch counts as prefill. Linear layers have Triton's kernels on a GPU, else C or torch; only
Triton's can be captured.

A draft model decodes several tokens in a row (`MultiStepDraftAttention`): one plan per step, all made before the first
step.

    step i     one row per request: the token at position seq_len + i, which sees seq_len + i + 1 tokens
    state i    a separate back end (workspace, plan), because plans of one object may share buffers

So nothing is planned or waited for between two draft steps, and all steps together can be one CUDA graph. Lengths are
known in advance, because a draft model accepts every token that it drafts. Each step drafts one token per request; only
decode back ends are made, no prefill.
(For a tree of drafts, each level is a verify batch with a mask: `SpecVerifyInput`.)

Source: the multi-step draft back ends of SGLang, where this is `speculative_step_id` and `skip_prefill`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attention.backends.registry import make_attention_backend, resolve_attention_backend
from attention.interface import AttentionBackend, AttentionPlan, GraphLimits, MLAInputs, MLAPlan, Shape
from attention.kv_cache import KVCache
from attention.linear.plan import LinearPlan
from attention.linear.states import StatePool
from attention.metadata import CommonAttentionMetadata
from attention.modes import MODES, Kernel
from ubatch import ConfigError, ForwardMode

if TYPE_CHECKING:
    from attention.linear.triton_plan import LinearRecords


def runs_in_triton(device: torch.device) -> bool:
    """Whether linear layers on this device run in Triton."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def make_linear_plan(pool: StatePool, metadata: CommonAttentionMetadata) -> LinearPlan:
    """The plan of a step; raises the errors of `LinearPlan`."""
    if not runs_in_triton(pool.device):
        return LinearPlan(pool, metadata)
    from attention.linear.triton_plan import TritonLinearPlan  # imports Triton

    return TritonLinearPlan(pool, metadata)


@dataclass(frozen=True)
class HybridPlan:
    """The plans of a model that has attention in some layers and linear attention in the others.

    Attributes:
        attention: an `AttentionPlan` or `MLAPlan`.
        linear: for the layers with linear attention.
    """

    attention: Any
    linear: LinearPlan

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """`forward` of the attention plan."""
        out: Tensor = self.attention.forward(*args, **kwargs)
        return out


Plan = AttentionPlan | MLAPlan | HybridPlan


class EmptyPlan:
    """The plan of a lane without tokens, or of an idle rank."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The empty result of empty inputs; see `AttentionPlan.forward` and `MLAPlan.forward`."""
        first = args[0]
        if isinstance(first, MLAInputs):
            return first.q_nope.new_zeros(first.q_nope.shape[0], first.w_uv.shape[0], first.w_uv.shape[2])
        return first.new_zeros(*first.shape[:2], args[2].shape[2])


class _Pair:
    """The back ends of one lane, or of the whole batch: one for prefill and one for decode, often the same.

    Attributes:
        records: what captured plans of linear layers read; None before `init_graph_buffers`, and without such layers.
    """

    records: LinearRecords | None = None

    def __init__(self, prefill: str, decode: str, shape: Shape, kv_cache: KVCache, states: StatePool | None) -> None:
        self._states = states
        self.prefill = make_attention_backend(prefill, shape, kv_cache)
        self.decode = self.prefill if decode == prefill else make_attention_backend(decode, shape, kv_cache)
        fills = {backend.name: backend.traits.seq_len_fill for backend in self.distinct}
        if len(set(fills.values())) > 1:
            raise ConfigError(
                f"attention back ends disagree about the length of a padding request: {fills}. "
                "Choose the same one for prefill and decode."
            )

    @property
    def distinct(self) -> tuple[AttentionBackend, ...]:
        return (self.prefill,) if self.decode is self.prefill else (self.prefill, self.decode)

    def plan(self, metadata: CommonAttentionMetadata) -> Plan:
        plan: Plan = EmptyPlan()
        if metadata.num_actual_tokens:
            plan = self.for_batch(metadata).plan(metadata)
        return plan if self._states is None else HybridPlan(plan, make_linear_plan(self._states, metadata))

    def init_graph_buffers(self, limits: GraphLimits) -> None:
        self.decode.init_graph_buffers(limits)
        if self._states is not None:
            from attention.linear.triton_plan import LinearRecords  # imports Triton

            self.records = LinearRecords(self._states, limits.max_reqs)

    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> Plan:
        if not MODES[metadata.mode].graph:
            raise ConfigError(
                f"{metadata.mode} batches are not captured: their shapes are not fixed. Run them eagerly."
            )
        plan: Plan = self.for_batch(metadata).plan_for_graph(metadata)
        return plan if self.records is None else HybridPlan(plan, self.records.plan_for_graph(metadata))

    def replan(self, plan: Plan, metadata: CommonAttentionMetadata) -> None:
        if isinstance(plan, HybridPlan):
            self.decode.replan(plan.attention, metadata)
            plan.linear.replan(metadata)
        else:
            self.decode.replan(plan, metadata)

    def for_batch(self, metadata: CommonAttentionMetadata) -> AttentionBackend:
        # An idle batch attends to nothing, but it may replay a graph, and graphs belong to the decode back end.
        return self.prefill if MODES[metadata.mode].kernel is Kernel.PREFILL else self.decode


def _lane_limits(limits: GraphLimits, num_lanes: int) -> GraphLimits:
    """The limits of the largest of `num_lanes` lanes. A lane holds whole requests, so its tokens follow from them."""
    max_reqs = -(-limits.max_reqs // num_lanes)
    tokens_per_request = -(-limits.max_tokens // limits.max_reqs)
    return replace(limits, max_reqs=max_reqs, max_tokens=min(limits.max_tokens, max_reqs * tokens_per_request))


class UBatchAttention:
    """Plans attention for whole batches and for lanes.

    Args:
        prefill: name of the back end for batches with a prefill.
        decode: name of the back end for decode, verify and draft-extend batches; None is the same as `prefill`.
        states: the recurrent states of a model with linear attention; its plans are `HybridPlan`s.

    Raises:
        ConfigError: an unknown back end, one that lacks what the model needs, or two that do not fit together.
    """

    def __init__(
        self,
        shape: Shape,
        kv_cache: KVCache,
        prefill: str = "auto",
        decode: str | None = None,
        *,
        states: StatePool | None = None,
    ) -> None:
        self.shape = shape
        self.states = states
        self.kv_cache = kv_cache
        self.prefill_name = resolve_attention_backend(prefill, shape, kv_cache, decode=False)
        self.decode_name = resolve_attention_backend(prefill if decode is None else decode, shape, kv_cache)
        self._whole = self._make()
        self._lanes: list[_Pair] = []

    def plan(self, metadata: CommonAttentionMetadata) -> Plan:
        """The plan of a batch that runs unsplit."""
        return self._whole.plan(metadata)

    def plan_lanes(self, lanes: Sequence[CommonAttentionMetadata]) -> list[Plan]:
        """One plan per lane; see `split_attn_metadata`."""
        self._grow(len(lanes))
        return [pair.plan(metadata) for pair, metadata in zip(self._lanes, lanes, strict=False)]

    def init_graph_buffers(self, limits: GraphLimits, num_lanes: int = 0) -> None:
        """Make the buffers of captured plans: for the whole batch, and smaller ones for `num_lanes` lanes.

        Only the decode back end gets them: prefills are not captured (`attention.modes`).

        Args:
            limits: the largest captured step of the whole batch.
            num_lanes: number of lanes that are captured, too; they are cut between requests.

        Raises:
            ConfigError: the decode back end, or a layer with linear attention, cannot be captured.
        """
        self._grow(num_lanes)
        if self.states is not None and not runs_in_triton(self.states.device):
            raise ConfigError(f"linear attention on {self.states.device} cannot run in a CUDA graph. Run it eagerly.")
        self._whole.init_graph_buffers(limits)
        for pair in self._lanes[:num_lanes]:
            pair.init_graph_buffers(_lane_limits(limits, num_lanes))

    @property
    def capturable(self) -> bool:
        """Whether decode and verify batches can be captured: their back end plans for graphs, and so do linear
        layers, see `linear_capturable`."""
        return self.linear_capturable and self._whole.decode.traits.graphs

    @property
    def linear_capturable(self) -> bool:
        """Whether no layer has linear attention, or its kernels are Triton's, which can be captured."""
        return self.states is None or runs_in_triton(self.states.device)

    @property
    def takes_trees(self) -> bool:
        """Whether verify batches may have trees of drafts: the decode back end takes masks, no layer is linear."""
        return self.states is None and self._whole.decode.traits.tree_mask

    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> Plan:
        """The plan that a graph of the unsplit batch is captured with; see `AttentionBackend.plan_for_graph`.

        Raises:
            ConfigError: batches of this mode are not captured, or there are no graph buffers for one this large.
        """
        return self._whole.plan_for_graph(metadata)

    def plan_lanes_for_graph(self, lanes: Sequence[CommonAttentionMetadata]) -> list[Plan]:
        """One plan per lane that a graph in lanes is captured with; errors as `plan_for_graph`."""
        self._grow(len(lanes))
        return [pair.plan_for_graph(metadata) for pair, metadata in zip(self._lanes, lanes, strict=False)]

    def replan(self, plan: Plan, metadata: CommonAttentionMetadata) -> None:
        """Make a plan of `plan_for_graph` describe this batch, padded. Call it before a replay; see `AttentionBackend`.

        Raises:
            ConfigError: the batch does not fit the plan.
        """
        self._whole.replan(plan, metadata)

    def replan_lanes(self, plans: Sequence[Plan], lanes: Sequence[CommonAttentionMetadata]) -> None:
        """`replan` for the plans of `plan_lanes_for_graph`; each lane is padded separately, an empty one entirely."""
        for pair, plan, metadata in zip(self._lanes, plans, lanes, strict=False):
            pair.replan(plan, metadata)

    def backend(self, metadata: CommonAttentionMetadata, lane: int | None = None) -> AttentionBackend:
        """The back end that plans this batch, for captured steps, which call `plan_for_graph` and `replan` on it."""
        if lane is not None:
            self._grow(lane + 1)
        return (self._whole if lane is None else self._lanes[lane]).for_batch(metadata)

    def memory(self) -> Mapping[str, int]:
        """Bytes that each back end holds now, by name: `whole/torch`, `lane 0/torch`, ..."""
        pairs = [("whole", self._whole), *((f"lane {lane}", pair) for lane, pair in enumerate(self._lanes))]
        return {f"{where}/{backend.name}": backend.nbytes for where, pair in pairs for backend in pair.distinct}

    def _make(self) -> _Pair:
        return _Pair(self.prefill_name, self.decode_name, self.shape, self.kv_cache, self.states)

    def _grow(self, count: int) -> None:
        while len(self._lanes) < count:
            self._lanes.append(self._make())


class MultiStepDraftAttention:
    """Plans the decode steps that draft a chain.

    Args:
        shape: the draft model's attention shape.
        kv_cache: the draft model's KV cache.
        num_steps: the most decode steps in a row, 1 or more.
        backend: name of the back end, as for decode batches.

    Attributes:
        backend_name: the back end in use; differs from `backend` if that is `auto`.

    Raises:
        ConfigError: no step at all, an unknown back end, or one that lacks what the model needs.
    """

    def __init__(self, shape: Shape, kv_cache: KVCache, num_steps: int, backend: str = "auto") -> None:
        if num_steps < 1:
            raise ConfigError(f"a draft model decodes at least 1 step in a row, not {num_steps}.")
        self.backend_name = resolve_attention_backend(backend, shape, kv_cache)
        self._states: list[AttentionBackend] = [
            make_attention_backend(self.backend_name, shape, kv_cache) for _ in range(num_steps)
        ]

    @property
    def num_steps(self) -> int:
        """The most decode steps in a row."""
        return len(self._states)

    def plan(self, seq_lens: Sequence[int], block_table: Tensor, slots: Tensor) -> list[Any]:
        """The plans of the next steps, one per row of `slots`; each holds until the next call.

        Args:
            seq_lens: tokens of each request that are in the draft model's cache before the first step.
            block_table: `[R, max_blocks]` int32; covers the last step's token, too.
            slots: `[steps, R]` int64; step i writes to row i, the slots of position `seq_len + i`.

        Raises:
            ConfigError: more steps than `num_steps`, or sizes that contradict each other.
        """
        batches = self._batches(seq_lens, block_table, slots)
        return [state.plan(batch) for state, batch in zip(self._states, batches, strict=False)]

    def init_graph_buffers(self, limits: GraphLimits) -> None:
        """Make the buffers of captured steps, for every state.

        Raises:
            ConfigError: the back end cannot be captured.
        """
        for state in self._states:
            state.init_graph_buffers(limits)

    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> list[Any]:
        """The plans of all `num_steps` steps that a graph is captured with, for a decode batch of its size.

        Raises:
            ConfigError: there are no graph buffers for one this large.
        """
        return [state.plan_for_graph(metadata) for state in self._states]

    def replan(self, plans: Sequence[Any], seq_lens: Sequence[int], block_table: Tensor, slots: Tensor) -> None:
        """Make plans of `plan_for_graph` describe these steps, padded. Call it before a replay. Arguments as `plan`.

        Raises:
            ConfigError: the requests do not fit the plans, or sizes contradict each other.
        """
        batches = self._batches(seq_lens, block_table, slots)
        for state, plan, batch in zip(self._states, plans, batches, strict=True):
            state.replan(plan, batch)

    def _batches(self, seq_lens: Sequence[int], block_table: Tensor, slots: Tensor) -> list[CommonAttentionMetadata]:
        steps = slots.shape[0]
        if steps > self.num_steps:
            raise ConfigError(
                f"{steps} draft steps were planned, but there are states for {self.num_steps}; make more of them."
            )
        ones = [1] * len(seq_lens)
        return [
            CommonAttentionMetadata.build(
                ones, [length + step + 1 for length in seq_lens], block_table, own, ForwardMode.DECODE
            )
            for step, own in enumerate(slots)
        ]

    def memory(self) -> Mapping[str, int]:
        """Bytes that each state holds now, by name: `step 0/torch`, ..."""
        return {f"step {step}/{state.name}": state.nbytes for step, state in enumerate(self._states)}
