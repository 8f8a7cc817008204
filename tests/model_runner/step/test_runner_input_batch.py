"""Flattening requests into a batch, against a plain loop; and shares that cannot be.

And the vote on that step: what each rank offers, and what comes of it.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention import MODES, BlockAllocator, KVCacheExhausted, KVCacheSpec, RequestToTokenTable
from model_runner import (
    Request,
    RequestError,
    SamplingParams,
    ScheduledRequest,
    build_input_batch,
    coordinate_batch_across_dp,
    make_offer,
)
from tests.support.shaped_steps import shaped_step
from ubatch import DeclineReason, ForwardMode, UBatchConfig, Wish, decide

SPEC = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4)


def make_shares(lengths: list[tuple[int, int, int]]) -> tuple[list[ScheduledRequest], RequestToTokenTable]:
    """Shares of requests given as (tokens computed, tokens to run now, tokens left after)."""
    allocator, table = BlockAllocator(200), RequestToTokenTable(16, 32, SPEC.block_size)
    shares = []
    for index, (computed, now, later) in enumerate(lengths):
        request = Request(index, [100 * index + i for i in range(computed + now + later)], SamplingParams())
        request.num_computed_tokens = computed
        request.row = table.add_row()
        table.append(request.row, allocator.allocate(SPEC.blocks_for(computed + now)))
        shares.append(ScheduledRequest(request, now))
    return shares, table


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 9), st.integers(0, 3)), max_size=8))
def test_against_a_plain_loop(lengths: list[tuple[int, int, int]]) -> None:
    shares, table = make_shares(lengths)
    batch = build_input_batch(shares, table, SPEC)
    ids, positions, slots, rows, starts = [], [], [], [], [0]
    for share in shares:
        request = share.request
        assert request.row is not None
        blocks = table.blocks(request.row)
        for position in range(request.num_computed_tokens, request.num_computed_tokens + share.num_tokens):
            ids.append(request.token_ids[position])
            positions.append(position)
            slots.append(blocks[position // 4] * 4 + position % 4)
        starts.append(len(ids))
        if request.num_computed_tokens + share.num_tokens == len(request.token_ids):
            rows.append(len(ids) - 1)
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.metadata.slot_mapping.tolist() == slots
    assert batch.metadata.query_start_loc.tolist() == starts
    assert batch.metadata.seq_lens.tolist() == [computed + now for computed, now, _ in lengths]
    assert batch.logits_rows.tolist() == rows
    assert sum(batch.rows_per_share) == len(rows)
    assert batch.num_tokens == len(ids)


@pytest.mark.parametrize(
    ("lengths", "mode"),
    [
        ([], ForwardMode.IDLE),
        ([(3, 1, 0), (9, 1, 0)], ForwardMode.DECODE),
        ([(0, 1, 0)], ForwardMode.PREFILL),
        ([(0, 4, 0), (4, 4, 0)], ForwardMode.PREFILL),
        ([(0, 4, 0), (4, 1, 0)], ForwardMode.MIXED),
    ],
)
def test_mode(lengths: list[tuple[int, int, int]], mode: ForwardMode) -> None:
    assert build_input_batch(*make_shares(lengths), SPEC).mode is mode


def test_shares_that_cannot_be() -> None:
    shares, table = make_shares([(2, 3, 0)])
    request = shares[0].request
    with pytest.raises(RequestError, match="0 tokens were scheduled, it has 3"):
        build_input_batch([ScheduledRequest(request, 0)], table, SPEC)
    with pytest.raises(RequestError, match="4 tokens were scheduled, it has 3"):
        build_input_batch([ScheduledRequest(request, 4)], table, SPEC)
    request.token_ids += [1] * 10
    with pytest.raises(KVCacheExhausted, match="blocks for 8 tokens and needs 9"):
        build_input_batch([ScheduledRequest(request, 7)], table, SPEC)
    request.row = None
    with pytest.raises(RequestError, match="no row"):
        build_input_batch([ScheduledRequest(request, 1)], table, SPEC)


def test_a_request_advances() -> None:
    request = Request("r", [5, 6, 7], SamplingParams(seed=4))
    assert request.num_uncomputed_tokens == 3
    request.advance(2, None)
    request.advance(1, 9)
    assert (request.num_uncomputed_tokens, request.output_token_ids, request.num_prompt_tokens) == (1, [9], 3)


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
