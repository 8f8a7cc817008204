"""Splitting by cost, and moving cuts out of spans that must stay together."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import check_covers

from ubatch import SplitCost, UBatchSlice, keep_together, split_by_cost, split_requests

COSTS = st.builds(SplitCost, st.floats(0.01, 100), st.floats(0, 10), st.none() | st.integers(1, 120))
REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=9)


def lane_costs(slices: tuple[UBatchSlice, ...], requests: list[tuple[int, int]], cost: SplitCost) -> list[float]:
    """Cost of every lane, token by token: what `SplitCost.of` says in closed form."""
    most = 10**9 if cost.window is None else cost.window
    seen = [min(prefix + i + 1, most) for query, prefix in requests for i in range(query)]
    tokens = [cost.per_token + cost.per_pair * pairs for pairs in seen]
    return [sum(tokens[piece.token_slice]) for piece in slices]


@pytest.mark.long
@settings(max_examples=75, deadline=None)
@given(REQUESTS, COSTS, st.integers(2, 4))
def test_the_costliest_lane_is_as_cheap_as_possible(
    requests: list[tuple[int, int]], cost: SplitCost, lanes: int
) -> None:
    query_lens, prefix_lens = [list(column) for column in zip(*requests, strict=True)]
    slices = split_by_cost(query_lens, prefix_lens, cost, lanes)
    check_covers(query_lens, slices, len(slices))
    if len(requests) < lanes:
        return
    weights = [cost.of(*request) for request in requests]
    best = min(
        max(sum(weights[start:stop]) for start, stop in pairwise((0, *cuts, len(weights))))
        for cuts in combinations(range(1, len(weights)), lanes - 1)
    )
    assert max(lane_costs(slices, requests, cost)) <= best * 1.001


@settings(max_examples=75, deadline=None)
@given(REQUESTS, COSTS)
def test_a_cut_inside_a_request_halves_the_cost_to_a_token(requests: list[tuple[int, int]], cost: SplitCost) -> None:
    query_lens, prefix_lens = [list(column) for column in zip(*requests, strict=True)]
    slices = split_by_cost(query_lens, prefix_lens, cost, 2, threshold=0.5)
    check_covers(query_lens, slices, len(slices))
    if sum(query_lens) < 2:
        return
    left, right = lane_costs(slices, requests, cost)
    dearest = max(cost.per_token + cost.per_pair * (query + prefix) for query, prefix in requests)
    assert abs(left - right) <= dearest * 1.001
    assert not any(piece.is_empty() for piece in slices)


def test_a_long_prefix_weighs_more_than_its_tokens() -> None:
    """One chunk far into a long prompt, and seven short prompts: equal tokens would leave lane 0 the dear ones."""
    query_lens, prefix_lens = [64] * 8, [100_000] + [0] * 7
    cost = SplitCost(per_token=1.0, per_pair=0.001)
    by_tokens = split_requests(query_lens, decode=False)
    by_cost = split_by_cost(query_lens, prefix_lens, cost)
    assert [piece.num_requests for piece in by_tokens] == [4, 4]
    assert [piece.num_requests for piece in by_cost] == [1, 7]


@given(st.integers(0, 60), st.integers(0, 60), COSTS)
def test_a_request_costs_what_its_tokens_cost(query_len: int, prefix_len: int, cost: SplitCost) -> None:
    whole = UBatchSlice(slice(0, 1), slice(0, query_len))
    assert cost.of(query_len, prefix_len) == pytest.approx(sum(lane_costs((whole,), [(query_len, prefix_len)], cost)))


def test_cuts_move_out_of_spans() -> None:
    lens = [10, 10, 10, 10, 10, 10]
    slices = split_requests(lens, decode=False)
    assert keep_together(slices, lens, []) == slices
    assert keep_together(slices, lens, [(0, 2), (3, 5)]) == slices  # the cut at 3 is between them
    moved = keep_together(slices, lens, [(2, 3)])  # 2 and 4 are equally near: the later one
    assert [piece.request_slice for piece in moved] == [slice(0, 4), slice(4, 6)]
    assert [piece.token_slice for piece in moved] == [slice(0, 40), slice(40, 60)]
    assert [piece.num_requests for piece in keep_together(slices, lens, [(2, 4)])] == [2, 4]
    nowhere = keep_together(slices, lens, [(0, 3), (2, 5)])
    assert sorted(piece.num_requests for piece in nowhere) == [0, 6]


def test_a_request_of_a_span_is_not_torn() -> None:
    lens = [10, 80, 10]
    torn = split_requests(lens, decode=False, two_chunk_threshold=0.5)
    assert torn[0].token_slice == slice(0, 50)
    assert keep_together(torn, lens, [(0, 0)]) == torn
    for span in ((1, 2), (1, 1)):
        whole = keep_together(torn, lens, [span])
        assert [piece.token_slice for piece in whole] in (
            [slice(0, 10), slice(10, 100)],
            [slice(0, 90), slice(90, 100)],
        )


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=10), st.integers(2, 4), st.data())
def test_no_span_is_cut(lens: list[int], lanes: int, data: st.DataObject) -> None:
    pairs = st.tuples(st.integers(0, len(lens) - 1), st.integers(0, len(lens) - 1)).map(sorted).map(tuple)
    spans = data.draw(st.lists(pairs, max_size=4))
    slices = keep_together(split_requests(lens, decode=False, num_ubatches=lanes), lens, spans)
    check_covers(lens, slices, lanes)
    for first, last in spans:
        lanes_of = [
            {lane for lane, piece in enumerate(slices) if piece.request_slice.start <= r < piece.request_slice.stop}
            for r in range(first, last + 1)
        ]
        assert len(set.union(*lanes_of)) == 1
