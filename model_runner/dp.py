"""Whether this step overlaps, agreed by all data-parallel ranks, and how this rank's batch is cut if it does.

Every rank votes at every step, idle ones too: one small all-reduce that also tells each rank everybody's token counts.
    too few tokens, dbo off, a lane would be empty      votes no, says why
    no tokens                                           votes idle: goes along, with empty lanes
    otherwise                                           votes yes, with its tokens per lane
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ubatch import (
    CommGroup,
    Decision,
    DeclineReason,
    ForwardMode,
    Offer,
    Schedule,
    UBatchConfig,
    UBatchSlice,
    Wish,
    decide,
    fingerprint,
    split_requests,
)

__all__ = ["Coordination", "coordinate_batch_across_dp", "make_offer"]


@dataclass(frozen=True)
class Coordination:
    """What all ranks do in this step.

    Attributes:
        decision: the vote's result, with every rank's tokens.
        slices: this rank's lanes when the step overlaps, else None.
    """

    decision: Decision
    slices: tuple[UBatchSlice, ...] | None

    @property
    def all_idle(self) -> bool:
        """No rank has a token: nothing runs."""
        return not any(any(row) for row in self.decision.tokens)


def coordinate_batch_across_dp(
    config: UBatchConfig, query_lens: Sequence[int], mode: ForwardMode, group: CommGroup | None
) -> Coordination:
    """Vote on this step. With a group, every rank of it must call this, equally often.

    Args:
        config: thresholds, lanes, schedule.
        query_lens: tokens of each of this rank's requests; empty on an idle rank.
        mode: what this rank's batch is.
        group: the ranks; None for one rank alone.

    Raises:
        PeerFailed, TransferTimeout, GroupBroken: see `CommGroup.vote`.
    """
    offer, slices = make_offer(config, query_lens, mode)
    decision = decide([offer]) if group is None else group.vote(offer)
    return Coordination(decision, slices if decision.engaged else None)


def make_offer(
    config: UBatchConfig, query_lens: Sequence[int], mode: ForwardMode
) -> tuple[Offer, tuple[UBatchSlice, ...] | None]:
    """This rank's vote, and its lanes if it would overlap."""
    schedule = config.resolved_schedule()
    decode = mode is ForwardMode.DECODE
    kind = ForwardMode.DECODE if decode else ForwardMode.PREFILL  # a mixed batch counts as prefill
    total = sum(query_lens)
    slices = None
    reason = _objection(config, schedule, total, decode=decode)
    if reason is None:
        slices = _split(config, schedule.lanes, query_lens, decode=decode)
        if total and any(piece.is_empty() for piece in slices):
            reason, slices = DeclineReason.LAST_UBATCH_EMPTY, None
    wish = Wish.NO if slices is None else Wish.YES if total else Wish.IDLE
    offer = Offer(
        wish=wish,
        tokens=(total,) if slices is None else tuple(piece.num_tokens for piece in slices),
        lanes=schedule.lanes,
        reason=reason,
        schedule=fingerprint(schedule.describe()),
        mode=fingerprint(kind),
    )
    return offer, slices


def _objection(config: UBatchConfig, schedule: Schedule, total: int, *, decode: bool) -> DeclineReason | None:
    if not config.enable_dbo:
        return DeclineReason.DISABLED
    if schedule.lanes == 1:
        return DeclineReason.SERIAL_SCHEDULE
    if not total:
        return None
    if decode and total < config.dbo_decode_token_threshold:
        return DeclineReason.BELOW_DECODE_THRESHOLD
    if not decode and total < config.dbo_prefill_token_threshold:
        return DeclineReason.BELOW_PREFILL_THRESHOLD
    return None


def _split(config: UBatchConfig, lanes: int, query_lens: Sequence[int], *, decode: bool) -> tuple[UBatchSlice, ...]:
    """Decode by request count, prefill balanced; with two lanes a long request may be cut (see `ubatch.split`).

    A cut through a request is safe here: all lanes pass the same points in ring order, so in every layer the lane
    with the earlier tokens has written their keys and values before the next lane attends to them.
    """
    threshold = config.tbo_token_distribution_threshold if lanes == 2 and not decode else 0.0
    return split_requests(query_lens, decode=decode, num_ubatches=lanes, two_chunk_threshold=threshold)
