"""What a step needs after its vote: attention plans, forward contexts, and the model's arguments."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attention import UBatchAttention, split_attn_metadata
from model_runner.parallel.tensor_parallel import WHOLE, Shard, padded_len, share_rows, share_tokens
from model_runner.step.step import Step
from ubatch import Decision, ForwardContext, ForwardMode, fingerprint
from ubatch.calls import Call
from ubatch.streams import to_device

_MODES = {fingerprint(mode): mode for mode in ForwardMode}


def plan_step(
    step: Step, attention: UBatchAttention, shard: Shard = WHOLE, *, needed_rows: Sequence[int] | None = None
) -> Step:
    """The step with an attention plan and a forward context for its batch, or if it overlaps in lanes, for each lane.

    Args:
        shard: this rank's place among those that share a replica, and have the same batch.
        needed_rows: rows of the batch whose output is read, ascending; None for all.
    """
    ids, positions, decision, size = step.input_ids, step.positions, step.decision, shard.size
    calls: list[Call]
    if step.slices is None:
        pieces, plans = [slice(0, step.num_tokens)], [attention.plan(step.metadata)]
        calls = [((ids, positions), {})]
    else:
        pieces = [lane.token_slice for lane in step.slices]
        plans = attention.plan_lanes(split_attn_metadata(step.slices, step.metadata))
        calls = [((ids[own], positions[own]), {}) for own in pieces]
    needed = _needed(needed_rows, pieces, shard, ids.device)
    global_mode = common_mode(decision)
    contexts = []
    for lane, (own, plan, rows) in enumerate(zip(pieces, plans, needed, strict=True)):
        tokens, count = decision.lane_tokens(lane), own.stop - own.start
        contexts.append(
            ForwardContext(
                attn_metadata=plan,
                num_tokens=count,
                mode=step.mode,
                tokens_across_ranks=share_tokens(tokens, size),
                decision=decision,
                schedule=step.schedule,
                local_dp_buffer_len=padded_len(count, size),
                global_dp_buffer_len=sum([padded_len(each, size) for each in tokens[::size]]),
                global_mode=global_mode,
                needed_rows=rows,
            )
        )
    return replace(step, calls=calls, contexts=contexts)


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
    busy = {mode for mode, row in zip(decision.modes, decision.tokens, strict=False) if sum(row)}
    return _MODES.get(busy.pop()) if len(busy) == 1 else None
