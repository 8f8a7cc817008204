"""One model's attention in lanes: a back end for the whole batch, and a separate one for every lane.

    whole batch     one back end, one plan
    N lanes         N back ends with N plans: lanes run at once, and kernels keep counters in their workspace
    empty lane      no back end: it attends to nothing and writes nothing
    hybrid model    every plan has a part for the layers with linear attention, over the same pool of states

The lanes' back ends are made on the first step that overlaps. Prefill and decode may run on different back ends over
the same cache; a mixed batch counts as prefill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attention.backends.registry import make_attention_backend, resolve_attention_backend
from attention.interface import AttentionBackend, AttentionPlan, GraphLimits, MLAInputs, MLAPlan, Shape
from attention.kv_cache import KVCache
from attention.linear import choice
from attention.linear.plan import LinearPlan
from attention.linear.states import StatePool
from attention.metadata import CommonAttentionMetadata
from attention.modes import MODES, Kernel
from ubatch import ConfigError

if TYPE_CHECKING:
    from attention.linear.triton_plan import LinearRecords


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

    def __init__(self, prefill: str, decode: str, shape: Shape, kv_cache: KVCache) -> None:
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

    def init_graph_buffers(self, limits: GraphLimits, states: StatePool | None) -> None:
        self.decode.init_graph_buffers(limits)
        if states is not None:
            self.records = choice.make_linear_records(states, limits.max_reqs)

    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> Plan:
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
        return self._plan(self._whole, metadata)

    def plan_lanes(self, lanes: Sequence[CommonAttentionMetadata]) -> list[Plan]:
        """One plan per lane; see `split_attn_metadata`."""
        self._grow(len(lanes))
        return [self._plan(pair, metadata) for pair, metadata in zip(self._lanes, lanes, strict=False)]

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
        if self.states is not None and not choice.runs_in_triton(self.states.device):
            raise ConfigError(f"linear attention on {self.states.device} cannot run in a CUDA graph. Run it eagerly.")
        self._whole.init_graph_buffers(limits, self.states)
        for pair in self._lanes[:num_lanes]:
            pair.init_graph_buffers(_lane_limits(limits, num_lanes), self.states)

    @property
    def capturable(self) -> bool:
        """Whether decode and verify batches can be captured: their back end plans for graphs, and so do linear
        layers, see `linear_capturable`."""
        return self.linear_capturable and self._whole.decode.traits.graphs

    @property
    def linear_capturable(self) -> bool:
        """Whether no layer has linear attention, or its kernels are Triton's, which can be captured."""
        return self.states is None or choice.runs_in_triton(self.states.device)

    @property
    def takes_trees(self) -> bool:
        """Whether verify batches may have trees of drafts: the decode back end takes masks, no layer is linear."""
        return self.states is None and self._whole.decode.traits.tree_mask

    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> Plan:
        """The plan that a graph of the unsplit batch is captured with; see `AttentionBackend.plan_for_graph`.

        Raises:
            ConfigError: batches of this mode are not captured, or there are no graph buffers for one this large.
        """
        return self._plan_for_graph(self._whole, metadata)

    def plan_lanes_for_graph(self, lanes: Sequence[CommonAttentionMetadata]) -> list[Plan]:
        """One plan per lane that a graph in lanes is captured with; errors as `plan_for_graph`."""
        self._grow(len(lanes))
        return [self._plan_for_graph(pair, metadata) for pair, metadata in zip(self._lanes, lanes, strict=False)]

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

    def _plan(self, pair: _Pair, metadata: CommonAttentionMetadata) -> Plan:
        plan: Plan = EmptyPlan()
        if metadata.num_actual_tokens:
            plan = pair.for_batch(metadata).plan(metadata)
        return plan if self.states is None else HybridPlan(plan, choice.make_linear_plan(self.states, metadata))

    def _plan_for_graph(self, pair: _Pair, metadata: CommonAttentionMetadata) -> Plan:
        if not MODES[metadata.mode].graph:
            raise ConfigError(
                f"{metadata.mode} batches are not captured: their shapes are not fixed. Run them eagerly."
            )
        return pair.plan_for_graph(metadata)

    def _make(self) -> _Pair:
        return _Pair(self.prefill_name, self.decode_name, self.shape, self.kv_cache)

    def _grow(self, count: int) -> None:
        while len(self._lanes) < count:
            self._lanes.append(self._make())
