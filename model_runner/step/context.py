"""The forward context of a step after its vote: attention plans, and every rank's number of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attention import UBatchAttention, split_attn_metadata
from model_runner.parallel.tensor_parallel import WHOLE, Shard, padded_len, share_rows, share_tokens
from model_runner.step.dp import Coordination
from model_runner.step.input_batch import InputBatch
from ubatch import Decision, ForwardContext, ForwardMode, fingerprint
from ubatch.streams.small_copies import to_device

__all__ = ["common_mode", "step_context"]

_MODES = {fingerprint(mode): mode for mode in ForwardMode}


def step_context(
    batch: InputBatch,
    agreed: Coordination,
    attention: UBatchAttention,
    shard: Shard = WHOLE,
    *,
    needed_rows: Sequence[int] | None = None,
) -> ForwardContext:
    """One context and attention plan for the batch, or if it overlaps in lanes, one of each per lane.

    Args:
        shard: this rank's place among those that share a replica, and have the same batch.
        needed_rows: rows of the batch whose output is read, ascending; None for all.
    """
    decision = agreed.decision
    mode = common_mode(decision)
    around = slice(0, batch.num_tokens)
    slices = None if agreed.slices is None else [lane.token_slice for lane in agreed.slices]
    needed = iter(_needed(needed_rows, slices or [around], shard, batch.input_ids.device))

    def context(plan: object | None, own: slice, tokens: Sequence[int]) -> ForwardContext:
        """A context for this rank's tokens `own`; `tokens` are those of every rank's replica."""
        replicas, count = tokens[:: shard.size], own.stop - own.start
        return ForwardContext(
            attn_metadata=plan,
            num_tokens=count,
            mode=batch.mode,
            tokens_across_ranks=share_tokens(tokens, shard.size),
            decision=decision,
            local_dp_buffer_len=padded_len(count, shard.size),
            global_dp_buffer_len=sum(padded_len(count, shard.size) for count in replicas),
            global_mode=mode,
            needed_rows=next(needed, None),
        )

    if agreed.slices is None or slices is None:
        whole = context(attention.plan(batch.metadata), around, decision.lane_tokens(0))
        return replace(whole, schedule=agreed.schedule)
    plans = attention.plan_lanes(split_attn_metadata(agreed.slices, batch.metadata))
    lanes = tuple(
        context(plan, own, decision.lane_tokens(lane))
        for lane, (own, plan) in enumerate(zip(slices, plans, strict=True))
    )
    everything = context(None, around, tuple(map(sum, decision.tokens)))
    return replace(everything, ubatch_slices=agreed.slices, lane_contexts=lanes, schedule=agreed.schedule)


def _needed(
    rows: Sequence[int] | None, parts: Sequence[slice], shard: Shard, device: torch.device
) -> list[Tensor | None]:
    """Of the ascending `rows` of a batch, those in this rank's share of each part, counted from the share's start."""
    if rows is None:
        return [None] * len(parts)
    found: list[Tensor] = []
    for part in parts:
        share = share_rows(part.stop - part.start, shard.rank, shard.size)
        first, stop = part.start + share.start, min(part.start + share.stop, part.stop)
        own = rows[bisect_left(rows, first) : bisect_left(rows, stop)]
        found.append(torch.tensor(own, dtype=torch.int64) - first)
    return list(to_device(found, device))


def common_mode(decision: Decision) -> ForwardMode | None:
    """The mode of all ranks with tokens; None if modes differ or no rank has tokens. Mixed counts as prefill."""
    busy = {mode for mode, row in zip(decision.modes, decision.tokens, strict=False) if any(row)}
    return _MODES.get(busy.pop()) if len(busy) == 1 else None
