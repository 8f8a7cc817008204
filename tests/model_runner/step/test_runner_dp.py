"""The vote on a step: what each rank offers, and what comes of it."""

from __future__ import annotations

import pytest

from attention import MODES
from model_runner import coordinate_batch_across_dp, make_offer
from tests.support.shaped_steps import shaped_step
from ubatch import DeclineReason, ForwardMode, UBatchConfig, Wish, decide

DECODE, PREFILL, MIXED, IDLE = ForwardMode.DECODE, ForwardMode.PREFILL, ForwardMode.MIXED, ForwardMode.IDLE


@pytest.mark.parametrize(
    ("config", "query_lens", "mode", "reason"),
    [
        (UBatchConfig(enable_dbo=False), [600], PREFILL, DeclineReason.DISABLED),
        (UBatchConfig(schedule="serial"), [600], PREFILL, DeclineReason.SERIAL_SCHEDULE),
        (UBatchConfig(), [1] * 31, DECODE, DeclineReason.BELOW_DECODE_THRESHOLD),
        (UBatchConfig(), [256, 255], PREFILL, DeclineReason.BELOW_PREFILL_THRESHOLD),
        (UBatchConfig(), [1] * 31 + [300], MIXED, DeclineReason.BELOW_PREFILL_THRESHOLD),
        (UBatchConfig(num_ubatches=3), [300, 300], PREFILL, DeclineReason.LAST_UBATCH_EMPTY),
        (UBatchConfig(tbo_token_distribution_threshold=0), [600], PREFILL, DeclineReason.LAST_UBATCH_EMPTY),
    ],
)
def test_a_rank_that_votes_no(
    config: UBatchConfig, query_lens: list[int], mode: ForwardMode, reason: DeclineReason
) -> None:
    offer, slices = make_offer(config, shaped_step(query_lens, mode))
    assert (offer.wish, offer.reason, offer.tokens, slices) == (Wish.NO, reason, (sum(query_lens),), None)
    alone = coordinate_batch_across_dp(config, shaped_step(query_lens, mode), None)
    assert (alone.decision.engaged, alone.decision.reason, alone.slices) == (False, reason, None)
    assert not alone.all_idle


@pytest.mark.parametrize(
    ("config", "query_lens", "mode", "tokens"),
    [
        (UBatchConfig(), [1] * 33, DECODE, (16, 17)),
        (UBatchConfig(), [128] * 8, PREFILL, (512, 512)),
        (UBatchConfig(), [1000], PREFILL, (500, 500)),  # cut inside the request
        (UBatchConfig(), [1, 1, 1, 1000], MIXED, (501, 502)),
        (UBatchConfig(num_ubatches=4), [128] * 8, PREFILL, (256,) * 4),
        (UBatchConfig(num_ubatches=3), [1] * 33, DECODE, (11, 11, 11)),
    ],
)
def test_a_rank_that_votes_yes(
    config: UBatchConfig, query_lens: list[int], mode: ForwardMode, tokens: tuple[int, ...]
) -> None:
    agreed = coordinate_batch_across_dp(config, shaped_step(query_lens, mode), None)
    assert agreed.decision.engaged
    assert agreed.decision.tokens == (tokens,)
    assert agreed.slices is not None
    assert tuple(piece.num_tokens for piece in agreed.slices) == tokens


def test_idle_ranks_go_along() -> None:
    idle, slices = make_offer(UBatchConfig(), shaped_step([], IDLE))
    assert (idle.wish, idle.tokens) == (Wish.IDLE, (0, 0))
    assert slices is not None
    assert all(piece.is_empty() for piece in slices)
    for mode, lens in ((DECODE, [1] * 40), (MIXED, [1, 600]), (PREFILL, [512, 512])):
        busy, _ = make_offer(UBatchConfig(), shaped_step(lens, mode))
        assert decide([busy, idle]).engaged
        assert decide([idle, busy], 1).engaged
    for config in (UBatchConfig(), UBatchConfig(enable_dbo=False), UBatchConfig(schedule="serial")):
        assert coordinate_batch_across_dp(config, shaped_step([], IDLE), None).all_idle


def test_decode_beside_prefill_declines_and_mixed_beside_prefill_does_not() -> None:
    decode, _ = make_offer(UBatchConfig(), shaped_step([1] * 40, DECODE))
    prefill, _ = make_offer(UBatchConfig(), shaped_step([600, 600], PREFILL))
    mixed, _ = make_offer(UBatchConfig(), shaped_step([1, 600, 600], MIXED))
    assert decide([decode, prefill]).reason is DeclineReason.MODES_DIFFER
    assert decide([mixed, prefill]).engaged


def test_schedules_are_told_apart() -> None:
    names = ("mlp_shared_overlap", "two_batch_decode", "two_batch_prefill")
    offers = [make_offer(UBatchConfig(schedule=name), shaped_step([1] * 40, DECODE))[0] for name in names]
    assert len({offer.schedule for offer in offers}) == 3
    assert decide(offers[:2]).reason is DeclineReason.SCHEDULES_DIFFER


def test_verify_splits_by_requests_and_draft_extend_never() -> None:
    drafts = [4] * 9
    verify, slices = make_offer(UBatchConfig(), shaped_step(drafts, ForwardMode.TARGET_VERIFY))
    assert verify.tokens == (16, 20)  # counts as decode: 36 tokens are above its threshold
    assert slices is not None
    few, _ = make_offer(UBatchConfig(), shaped_step(drafts[:7], ForwardMode.TARGET_VERIFY))
    assert few.reason is DeclineReason.BELOW_DECODE_THRESHOLD
    extend, slices = make_offer(UBatchConfig(), shaped_step([3, 1, 4] * 200, ForwardMode.DRAFT_EXTEND))
    assert (extend.reason, slices) == (DeclineReason.MODE_NOT_SPLIT, None)


def test_every_mode_has_a_row_in_the_table() -> None:
    assert set(MODES) == set(ForwardMode)
