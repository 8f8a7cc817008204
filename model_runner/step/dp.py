"""The vote of all ranks whether a step overlaps, and the split of this rank's batch if it does.

Every rank votes at every step, idle ones too: one small all-reduce, which also gives each rank all token counts.
    too few tokens, dbo off, a lane would be empty      votes no, with the reason
    no gain is expected (`model_runner.auto`)           votes no
    one lane that overlaps in itself (single-batch)     votes yes, without a split
    no split keeps requests together that need each other's keys and values    votes no (`attention.kv_order`)
    no tokens                                           votes idle: joins the other ranks, with empty lanes
    otherwise                                           votes yes, with its tokens per lane
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attention import MODES, SplitKind
from model_runner.errors import TensorParallelMismatch
from model_runner.step.graph_sizes import GraphShape
from model_runner.step.request import ScheduledRequest
from ubatch import (
    CommGroup,
    Decision,
    DeclineReason,
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
from ubatch.schedules.split_mixed import split_mixed

__all__ = [
    "BatchShape",
    "Coordination",
    "check_same_requests",
    "content_of",
    "coordinate_batch_across_dp",
    "make_offer",
]


_NOT_SPLIT = (DeclineReason.MODE_NOT_SPLIT, "steps of this mode are never split.")
_NO_GAIN = (DeclineReason.NO_GAIN_EXPECTED, "such steps are not expected to be faster.")
_TOKENS_ALONE = SplitCost(per_token=1.0, per_pair=0.0)


def _no_pairs() -> Sequence[tuple[int, int]]:
    return ()


@dataclass(frozen=True)
class BatchShape:
    """The data of this rank's batch for the vote, all on the host.

    `build_input_batch` fills the first four fields, `StepRunner.coordinate` the others, right before the vote.

    Attributes:
        query_lens: tokens of each request in this step; empty on an idle rank.
        mode: mode of the batch.
        prefix_lens: tokens of each request that are in the cache already; needed to split by cost.
        late_reads: returns (reader, writer) pairs of requests that must be in one lane, see
            `attention.reads_of_later_writes`. It is slow, and called only if the batch would be split.
        cost: cost of a token and of an attended pair in this model; needed to split by cost.
        graph_mode: the CUDA graphs this rank could replay for the batch, `Offer.graph_mode`; 0 for none.
        content: fingerprint of the requests' tokens if other ranks must run the same, `Offer.content`; else 0.
        period_us: see `Offer.period_us`.
        no_gain: overlap is not expected to make the step faster.
        told: see `Offer.told`.
    """

    query_lens: Sequence[int]
    mode: ForwardMode
    prefix_lens: Sequence[int] = ()
    late_reads: Callable[[], Sequence[tuple[int, int]]] = _no_pairs
    cost: SplitCost = _TOKENS_ALONE
    graph_mode: int = 0
    content: int = 0
    period_us: int = 0
    no_gain: bool = False
    told: tuple[int, ...] = ()

    @property
    def prefill_tokens(self) -> int:
        """Tokens of requests that do not decode; 0 in a step that verifies drafts."""
        if self.mode not in (ForwardMode.PREFILL, ForwardMode.MIXED):
            return 0
        decodes = (length == 1 and done > 0 for length, done in zip(self.query_lens, self.prefix_lens, strict=False))
        return sum(self.query_lens) - sum(decodes)


@dataclass(frozen=True)
class Coordination:
    """The result of the vote on a step.

    Attributes:
        decision: the decision, with every rank's tokens.
        slices: this rank's lanes if the step overlaps in lanes, else None.
        schedule: the schedule if the step overlaps, else None.
        graph: the graph that all ranks replay; None if the step runs eagerly. `GraphSteps.agree` fills it.
    """

    decision: Decision
    slices: tuple[UBatchSlice, ...] | None
    graph: GraphShape | None = None
    schedule: Schedule | None = None

    @property
    def all_idle(self) -> bool:
        """No rank has a token: nothing runs."""
        return not any(any(row) for row in self.decision.tokens)


def coordinate_batch_across_dp(
    config: UBatchConfig, batch: BatchShape, group: CommGroup | None, tensor_parallel_size: int = 1
) -> Coordination:
    """Vote on this step. Every rank of the group must call this for every step.

    Ranks that share a replica make the same offer, with the replica's tokens.

    Args:
        config: thresholds, lanes, schedules.
        batch: this rank's batch.
        group: the ranks; None for a single rank.
        tensor_parallel_size: ranks of a replica.

    Raises:
        TensorParallelMismatch: ranks of a replica have different requests.
        ConfigError: this rank has no tokens, and the others run a schedule that it does not have.
        PeerFailed, TransferTimeout, GroupBroken: see `CommGroup.vote`.
    """
    offer, slices = make_offer(config, batch)
    decision = decide([offer]) if group is None else group.vote(offer)
    check_same_requests(decision, tensor_parallel_size)
    if not decision.engaged:
        return Coordination(decision, None)
    schedule = config.agreed_schedule(decision, batch.mode)
    if offer.wish is Wish.IDLE:  # an idle rank votes without knowing the others' number of lanes
        slices = (UBatchSlice(slice(0, 0), slice(0, 0)),) * schedule.lanes
    return Coordination(decision, slices if schedule.lanes > 1 else None, schedule=schedule)


def make_offer(config: UBatchConfig, batch: BatchShape) -> tuple[Offer, tuple[UBatchSlice, ...] | None]:
    """This rank's vote, and its lanes if it would overlap."""
    schedule = config.for_mode(batch.mode).schedule
    total = sum(batch.query_lens)
    slices = None
    no = config.switched_off(schedule if total else None)
    if no is None and total:
        never = MODES[batch.mode].split is SplitKind.NEVER
        no = _NOT_SPLIT if never else _NO_GAIN if batch.no_gain else config.below_threshold(batch.mode, total)
    reason = None if no is None else no[0]
    if reason is None and schedule.lanes > 1:
        wanted = _split(config, schedule, batch)
        slices = keep_together(wanted, batch.query_lens, batch.late_reads())
        if total and any(piece.is_empty() for piece in slices):
            whole = any(piece.is_empty() for piece in wanted)
            reason, slices = DeclineReason.LAST_UBATCH_EMPTY if whole else DeclineReason.KV_ORDER, None
    wish = Wish.NO if reason is not None else Wish.YES if total else Wish.IDLE
    # A mixed batch counts as prefill, so that it can overlap with a prefill on another rank.
    kind = ForwardMode.PREFILL if batch.mode is ForwardMode.MIXED else batch.mode
    offer = Offer(
        wish=wish,
        tokens=(total,) if slices is None else tuple(piece.num_tokens for piece in slices),
        lanes=schedule.lanes,
        reason=reason,
        schedule=fingerprint(schedule.describe()),
        mode=fingerprint(kind),
        graph_mode=batch.graph_mode,
        content=batch.content,
        prefill_tokens=batch.prefill_tokens,
        period_us=batch.period_us,
        told=batch.told,
    )
    return offer, slices


def _split(config: UBatchConfig, schedule: Schedule, batch: BatchShape) -> tuple[UBatchSlice, ...]:
    """Split decode and verify batches by request count, prefills by tokens or cost; with two lanes a long request may
    be cut in two. In a split by cost, a mixed batch may have its decodes in a separate lane.

    Cutting a request is safe: all lanes pass the same points in ring order, so in every layer the lane with the earlier
    tokens writes their keys and values before the next lane reads them.
    """
    fixed = MODES[batch.mode].split is SplitKind.FIXED
    lanes = schedule.lanes
    threshold = config.tbo_token_distribution_threshold if lanes == 2 and not fixed else 0.0
    if config.split_by == SplitBy.COST and batch.mode is ForwardMode.MIXED:
        return split_mixed(batch.query_lens, batch.prefix_lens, batch.cost, schedule, threshold)
    if config.split_by == SplitBy.COST and not fixed:
        return split_by_cost(batch.query_lens, batch.prefix_lens, batch.cost, lanes, threshold)
    return split_requests(batch.query_lens, decode=fixed, num_ubatches=lanes, two_chunk_threshold=threshold)


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
