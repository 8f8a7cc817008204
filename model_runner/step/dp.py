"""The vote of all ranks whether a step overlaps, and the split of this rank's batch if it does.

Every rank votes at every step, idle ones too: one small all-gather, which also gives each rank all token counts.
    too few tokens, dbo off, a lane would be empty      votes no, with the reason
    no gain is expected (`model_runner.auto`)           votes no
    one lane that overlaps in itself (single-batch)     votes yes, without a split
    no split keeps requests together that need each other's keys and values    votes no (`attention.kv_tables`)
    no tokens                                           votes idle: joins the other ranks, with empty lanes
    otherwise                                           votes yes, with its tokens per lane

After the vote `plan_step` adds what the step needs: attention plans, forward contexts, and the model's arguments.
"""

import zlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention import MODES, SplitKind, UBatchAttention, split_attn_metadata
from model_runner.errors import TensorParallelMismatch
from model_runner.parallel.tensor_parallel import WHOLE, Shard, padded_len, share_rows, share_tokens
from model_runner.step.request import ScheduledRequest
from model_runner.step.step import Step
from ubatch import (
    CommGroup,
    Decision,
    DeclineReason,
    ForwardContext,
    ForwardMode,
    Offer,
    Schedule,
    SplitBy,
    SplitCost,
    UBatchConfig,
    UBatchSlice,
    Wish,
    decide,
    fingerprint,
    keep_together,
    split_by_cost,
    split_requests,
)
from ubatch.calls import Call
from ubatch.schedules import split_mixed
from ubatch.streams import to_device

_NOT_SPLIT = (DeclineReason.MODE_NOT_SPLIT, "steps of this mode are never split.")
_NO_GAIN = (DeclineReason.NO_GAIN_EXPECTED, "such steps are not expected to be faster.")
_TOKENS_ALONE = SplitCost(per_token=1.0, per_pair=0.0)


def coordinate_batch_across_dp(
    config: UBatchConfig,
    step: Step,
    group: CommGroup | None,
    tensor_parallel_size: int = 1,
    cost: SplitCost = _TOKENS_ALONE,
    *,
    no_gain: bool = False,
    **numbers: Any,
) -> Step:
    """Vote on this step; returns it with the decision. Every rank of the group must call this for every step.

    Ranks that share a replica make the same offer, with the replica's tokens.

    Args:
        config: thresholds, lanes, schedules.
        step: this rank's step, with its batch.
        group: the ranks; None for a single rank.
        tensor_parallel_size: ranks of a replica.
        cost, no_gain: see `make_offer`.
        numbers: what else the vote carries: `graph_mode`, `content`, `period_us`, `told` of `Offer`.

    Raises:
        TensorParallelMismatch: ranks of a replica have different requests.
        ConfigError: this rank has no tokens, and the others run a schedule that it does not have.
        PeerFailed, TransferTimeout, GroupBroken: see `CommGroup.vote`.
    """
    offer, slices = make_offer(config, step, cost, no_gain=no_gain, **numbers)
    decision = decide([offer]) if group is None else group.vote(offer)
    check_same_requests(decision, tensor_parallel_size)
    if not decision.engaged:
        return replace(step, decision=decision)
    schedule = config.agreed_schedule(decision, step.mode)
    if offer.wish is Wish.IDLE:  # an idle rank votes without knowing the others' number of lanes
        slices = (UBatchSlice(slice(0, 0), slice(0, 0)),) * schedule.lanes
    return replace(step, decision=decision, slices=slices if schedule.lanes > 1 else None, schedule=schedule)


def make_offer(
    config: UBatchConfig, step: Step, cost: SplitCost = _TOKENS_ALONE, *, no_gain: bool = False, **numbers: Any
) -> tuple[Offer, tuple[UBatchSlice, ...] | None]:
    """This rank's vote, and its lanes if it would overlap.

    Args:
        cost: cost of a token and of an attended pair in this model; needed to split by cost.
        no_gain: overlap is not expected to make the step faster.
        numbers: see `coordinate_batch_across_dp`.
    """
    schedule, mode = config.for_mode(step.mode).schedule, step.mode
    total = step.num_tokens
    slices, tokens = None, [total]
    no = config.switched_off(schedule if total else None)
    if no is None and total:
        never = MODES[mode].split is SplitKind.NEVER
        no = _NOT_SPLIT if never else _NO_GAIN if no_gain else config.below_threshold(mode, total)
    reason = None if no is None else no[0]
    if reason is None and schedule.lanes > 1:
        wanted = _split(config, schedule, step, cost)
        slices = keep_together(wanted, step.query_lens, step.late_reads())
        tokens = [piece.num_tokens for piece in slices]
        if total and 0 in tokens:
            empty_anyway = 0 in [piece.num_tokens for piece in wanted]
            reason = DeclineReason.LAST_UBATCH_EMPTY if empty_anyway else DeclineReason.KV_ORDER
            slices, tokens = None, [total]
    wish = Wish.NO if reason is not None else Wish.YES if total else Wish.IDLE
    # A mixed batch counts as prefill, so that it can overlap with a prefill on another rank.
    kind = ForwardMode.PREFILL if mode is ForwardMode.MIXED else mode
    offer = Offer(
        wish=wish,
        tokens=tuple(tokens),
        lanes=schedule.lanes,
        reason=reason,
        schedule=schedule.fingerprint,
        mode=fingerprint(kind),
        prefill_tokens=step.prefill_tokens,
        **numbers,
    )
    return offer, slices


def _split(config: UBatchConfig, schedule: Schedule, step: Step, cost: SplitCost) -> tuple[UBatchSlice, ...]:
    """Split decode and verify batches by request count, prefills by tokens or cost; with two lanes a long request may
    be cut in two. In a split by cost, a mixed batch may have its decodes in a separate lane.

    Cutting a request is safe: all lanes pass the same points in ring order, so in every layer the lane with the earlier
    tokens writes their keys and values before the next lane reads them.
    """
    fixed = MODES[step.mode].split is SplitKind.FIXED
    lanes = schedule.lanes
    threshold = config.tbo_token_distribution_threshold if lanes == 2 and not fixed else 0.0
    if config.split_by == SplitBy.COST and step.mode is ForwardMode.MIXED:
        return split_mixed(step.query_lens, step.prefix_lens, cost, schedule, threshold)
    if config.split_by == SplitBy.COST and not fixed:
        return split_by_cost(step.query_lens, step.prefix_lens, cost, lanes, threshold)
    return split_requests(step.query_lens, decode=fixed, num_ubatches=lanes, two_chunk_threshold=threshold)


def content_of(scheduled: Sequence[ScheduledRequest]) -> int:
    """A fingerprint of a rank's requests, for the vote: equal for equal tokens at equal positions; never 0."""
    content = 1
    for share in scheduled:
        request, start = share.request, share.request.num_computed_tokens
        tokens = request.token_ids[start : start + share.num_tokens]
        numbers = (start, len(tokens), *tokens, *share.drafts, *(share.parents or ()))
        if share.restore is not None or share.keep is not None:
            numbers += (-1 if share.restore is None else share.restore, -1 if share.keep is None else share.keep)
        content = zlib.crc32(array("q", numbers).tobytes(), content)
    return content or 1


def check_same_requests(decision: Decision, size: int) -> None:
    """Check that the ranks of each replica have the same requests. All ranks raise the same error.

    Raises:
        TensorParallelMismatch: their requests differ; nothing has run.
    """
    if size == 1:
        return
    offered = list(zip(decision.tokens, decision.modes, decision.contents or (0,) * len(decision.tokens), strict=True))
    for first in range(0, len(offered), size):
        for rank in range(first + 1, first + size):
            if offered[rank] != offered[first]:
                raise TensorParallelMismatch(
                    f"ranks {first} and {rank} of the group are one replica (tensor_parallel_size {size}), but came to "
                    f"this step with different requests: {sum(offered[first][0])} and {sum(offered[rank][0])} tokens. "
                    "Launch the same requests, with the same tokens and seeds, in the same order on both."
                )


_BY_FINGERPRINT = {fingerprint(mode): mode for mode in ForwardMode}


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
    return _BY_FINGERPRINT.get(busy.pop()) if len(busy) == 1 else None
