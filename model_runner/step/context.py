"""The forward context of a step after its vote: attention plans, and every rank's number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attention import UBatchAttention, split_attn_metadata
from model_runner.parallel.tensor_parallel import padded_len, share_tokens
from model_runner.step.dp import Coordination
from model_runner.step.input_batch import InputBatch
from ubatch import Decision, ForwardContext, ForwardMode, fingerprint

__all__ = ["common_mode", "step_context"]

_MODES = {fingerprint(mode): mode for mode in ForwardMode}


def step_context(
    batch: InputBatch, agreed: Coordination, attention: UBatchAttention, tensor_parallel_size: int = 1
) -> ForwardContext:
    """One context and attention plan for the batch, or if it overlaps in lanes, one of each per lane.

    Args:
        tensor_parallel_size: ranks that share a replica, and have the same batch.
    """
    decision = agreed.decision
    mode = common_mode(decision)

    def context(plan: object | None, own: int, tokens: Sequence[int]) -> ForwardContext:
        """A context for `own` tokens of this rank; `tokens` are those of every rank's replica."""
        replicas = tokens[::tensor_parallel_size]
        return ForwardContext(
            attn_metadata=plan,
            num_tokens=own,
            mode=batch.mode,
            tokens_across_ranks=share_tokens(tokens, tensor_parallel_size),
            decision=decision,
            local_dp_buffer_len=padded_len(own, tensor_parallel_size),
            global_dp_buffer_len=sum(padded_len(count, tensor_parallel_size) for count in replicas),
            global_mode=mode,
        )

    if agreed.slices is None:
        whole = context(attention.plan(batch.metadata), batch.num_tokens, decision.lane_tokens(0))
        return replace(whole, schedule=agreed.schedule)
    parts = split_attn_metadata(agreed.slices, batch.metadata)
    lanes = tuple(
        context(plan, metadata.num_actual_tokens, decision.lane_tokens(lane))
        for lane, (metadata, plan) in enumerate(zip(parts, attention.plan_lanes(parts), strict=True))
    )
    around = context(None, batch.num_tokens, tuple(map(sum, decision.tokens)))
    return replace(around, ubatch_slices=agreed.slices, lane_contexts=lanes, schedule=agreed.schedule)


def common_mode(decision: Decision) -> ForwardMode | None:
    """The mode of all ranks with tokens; None if modes differ or no rank has tokens. Mixed counts as prefill."""
    busy = {mode for mode, row in zip(decision.modes, decision.tokens, strict=False) if any(row)}
    return _MODES.get(busy.pop()) if len(busy) == 1 else None
