"""Flattening requests into a batch, against a plain loop; and shares that cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention import BlockAllocator, KVCacheExhausted, KVCacheSpec, RequestToTokenTable
from model_runner import Request, RequestError, SamplingParams, ScheduledRequest, build_input_batch
from ubatch import ForwardMode

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
