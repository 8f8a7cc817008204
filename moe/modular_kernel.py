"""One MoE layer between router and residual, and every point at which it may hand the baton on.

    Contract: routed tokens in, their weighted expert outputs (plus the shared expert's) out, same order.

    comp:  | prepare |~~~~~~~~~| experts |~~~~~~~~~| finalize |
    comm:            |dispatch |         | combine |
                     ^         ^         ^         ^
                  SELECT    DISPATCH     |      COMBINE, then OUTPUT
                (before)  (after launch) launch

At `~` this lane waits and another one computes. The shared expert, which needs no communication, fills one of the two
gaps of its own lane too: after dispatch's launch, after combine's launch, or when the baton is back from there.

Outside a lane the same code runs straight through. A receive hook then runs as soon as it is registered, so hooks are
registered only after everything that shall overlap with the transfer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe.all2all import All2All
from moe.experts import Experts
from ubatch import (
    ConfigError,
    Point,
    Schedule,
    SharedExpert,
    current_schedule,
    dbo_maybe_run_recv_hook,
    dbo_register_recv_hook,
    dbo_yield,
)

__all__ = ["FusedMoEModularKernel"]


class FusedMoEModularKernel(nn.Module):
    """prepare -> experts -> finalize, from a transport and the experts of this rank.

    Args:
        all2all: carries tokens to experts and back.
        experts: those of this rank.
        shared_experts: applied to every token beside the routed ones, `[T, H] -> [T, H]`.

    Raises:
        ConfigError: `all2all` sends other experts' tokens here than `experts` holds.

    Source: vLLM's `FusedMoEModularKernel` and its `MLP_SHARED_OVERLAP` schedule; SGLang's two-batch operations.
    """

    def __init__(self, all2all: All2All[Any], experts: Experts, shared_experts: nn.Module | None = None) -> None:
        super().__init__()
        if experts.expert_range != all2all.experts:
            raise ConfigError(
                f"the experts hold {experts.expert_range}, but the all2all back end sends this rank the tokens of "
                f"{all2all.experts}. Slice the weights by local_experts()."
            )
        self.all2all = all2all
        self.experts = experts
        self.shared_experts = shared_experts

    def forward(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Run the layer.

        Args:
            hidden_states: `[T, H]`, floating; T may be 0 and differ between ranks.
            topk_weights: `[T, k]` float32.
            topk_ids: `[T, k]` int64, global expert ids; -1 for no expert (padding: `mask_padding`).

        Returns:
            `[T, H]`, dtype of `hidden_states`.

        Raises:
            ConfigError: wrong shapes or dtypes, `k` above the number of experts, or a schedule with more lanes or
                chunks than the transport serves.
        """
        schedule = current_schedule()
        self._check(hidden_states, topk_weights, topk_ids, schedule)

        # --- prepare: tokens travel to their experts ---
        dbo_yield(Point.SELECT)
        dbo_maybe_run_recv_hook()
        dispatch = self.all2all.dispatch(hidden_states, topk_ids, topk_weights)
        shared = self._shared(hidden_states, SharedExpert.DISPATCH, schedule)
        dbo_register_recv_hook(dispatch.wait)
        dbo_yield(Point.DISPATCH)
        received = dispatch.wait()

        # --- experts ---
        partial_sums = self.experts(received.hidden_states, received.topk_ids, received.topk_weights)

        # --- finalize: partial sums travel home ---
        dbo_maybe_run_recv_hook()
        combine = self.all2all.combine(partial_sums, received.handle)
        del dispatch, received, partial_sums  # while other lanes run, only the transfer keeps what it still needs
        if schedule.shared_expert is SharedExpert.COMBINE_RETURN:
            dbo_yield(Point.COMBINE)  # no hook: the wait comes after the shared expert
            shared = self._shared(hidden_states, SharedExpert.COMBINE_RETURN, schedule)
        else:
            if shared is None:
                shared = self._shared(hidden_states, SharedExpert.COMBINE, schedule)
            dbo_register_recv_hook(combine.wait)
            dbo_yield(Point.COMBINE)
        routed = combine.wait()
        dbo_yield(Point.OUTPUT)
        return routed if shared is None else routed + shared

    def _shared(self, hidden_states: Tensor, place: SharedExpert, schedule: Schedule) -> Tensor | None:
        """The shared expert's output, if there is one and the schedule wants it at this place."""
        if self.shared_experts is None or schedule.shared_expert is not place:
            return None
        output: Tensor = self.shared_experts(hidden_states)
        return output

    def _check(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, schedule: Schedule) -> None:
        if hidden_states.dim() != 2 or not hidden_states.is_floating_point():
            raise ConfigError(
                f"hidden_states must be floating [tokens, hidden], not {hidden_states.dtype} "
                f"{list(hidden_states.shape)}. Flatten batch and sequence."
            )
        if topk_weights.dtype != torch.float32 or topk_ids.dtype != torch.int64:
            raise ConfigError(
                f"topk_weights must be float32 and topk_ids int64, not {topk_weights.dtype} and {topk_ids.dtype}."
            )
        tokens, num_experts = hidden_states.shape[0], self.all2all.num_experts
        if topk_ids.dim() != 2 or topk_ids.shape != topk_weights.shape or topk_ids.shape[0] != tokens:
            raise ConfigError(
                f"topk_weights {list(topk_weights.shape)} and topk_ids {list(topk_ids.shape)} must both be "
                f"[{tokens}, k], one row per token."
            )
        if not 1 <= topk_ids.shape[1] <= num_experts:
            raise ConfigError(f"top_k = {topk_ids.shape[1]} must be between 1 and the {num_experts} experts there are.")
        traits = self.all2all.traits
        if traits.max_lanes is not None and schedule.lanes > traits.max_lanes:
            raise ConfigError(
                f"schedule {schedule.name!r} has {schedule.lanes} lanes, but the all2all back end serves "
                f"{traits.max_lanes}. Lower num_ubatches."
            )
        if schedule.chunks > traits.max_chunks:
            raise ConfigError(
                f"schedule {schedule.name!r} has {schedule.chunks} chunks, but the all2all back end serves "
                f"{traits.max_chunks}. Choose a schedule with fewer."
            )
