"""Splitting: the golden cases, slow references as oracles, and properties that every split has."""

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import check_covers, lane_query_lens

from ubatch import UBatchSlice, keep_together, split_balanced, split_fixed, split_requests, split_two_chunk
from ubatch.errors import ConfigError, SplitError
from ubatch.schedules.split_cost import SplitCost, split_by_cost

THRESHOLD = 0.48

lengths = st.lists(st.integers(0, 40), max_size=9)
"""Small, with zeros, so that ties and empty requests are common."""
skewed_lengths = st.lists(st.sampled_from([1, 2, 3, 7, 50, 400]), min_size=1, max_size=9)
lane_counts = st.integers(2, 5)
thresholds = st.sampled_from([0.0, 0.1, 0.3, 0.4, 0.48, 0.5])


# ---------------------------------------------------------------------------------------------- slow references


def reference_balanced_index(lens: Sequence[int]) -> int:
    """Every cut tried, the last of the best ones taken."""
    best, best_difference = 0, float("inf")
    for index in range(1, len(lens)):
        difference = abs(sum(lens[:index]) - sum(lens[index:]))
        if difference <= best_difference:
            best, best_difference = index, difference
    return best


def reference_smallest_largest_lane(lens: Sequence[float], lanes: int) -> float:
    """Every way to cut into lanes with a request each tried."""
    return min(
        max(sum(lens[start:stop]) for start, stop in itertools.pairwise((0, *cuts, len(lens))))
        for cuts in itertools.combinations(range(1, len(lens)), lanes - 1)
    )


def reference_two_chunk(lens: Sequence[int], threshold: float) -> tuple[int, int, int]:
    """(end of lane 0's requests, start of lane 1's, tokens of lane 0), word for word after the rule."""
    total, index = sum(lens), reference_balanced_index(lens)
    left = sum(lens[:index])
    half = total // 2
    k = next((i for i in range(len(lens)) if sum(lens[: i + 1]) > half), 0)
    if not (left < threshold * total or left > (1 - threshold) * total) or k + 1 > half:
        return index, index, left
    left_of_straddling = half - sum(lens[:k])
    return (k + 1 if left_of_straddling else k), k, half


def indices(parts: Sequence[UBatchSlice]) -> tuple[int, int]:
    """`(split_seq_index, split_token_index)` of two lanes."""
    _, second = parts
    return second.request_slice.start, second.token_slice.start


# ------------------------------------------------------------------------------------------------------- golden


def test_slice_properties() -> None:
    part = UBatchSlice(slice(2, 5), slice(10, 17))
    assert (part.num_requests, part.num_tokens, part.is_empty()) == (3, 7, False)
    assert UBatchSlice(slice(2, 2), slice(10, 10)).is_empty()
    assert UBatchSlice(slice(2, 3), slice(10, 10)).is_empty(), "a request without tokens is no work"
    with pytest.raises(AttributeError):
        part.token_slice = slice(0, 1)  # type: ignore[misc]


GOLDEN = [
    *[(split_fixed(8, 1), (4, 4)), (split_fixed(4, 5), (2, 10)), (split_fixed(7, 1), (3, 3))],
    *[(split_fixed(2, 1), (1, 1)), (split_fixed(1, 3), (0, 0)), (split_fixed(0, 1), (0, 0))],
    (split_balanced([100, 50, 30, 80, 40, 60]), (3, 180)),
    (split_balanced([10, 20, 30, 500, 40]), (3, 60)),
    (split_balanced([1, 2, 1]), (2, 3)),  # |1 - 3| == |3 - 1|: the later index
    (split_balanced([5, 0, 0]), (2, 5)),  # cutting before or after an empty request is a tie too
    *[(split_balanced([42]), (0, 0)), (split_balanced([]), (0, 0))],
    *[(split_two_chunk([42], THRESHOLD), (0, 21)), (split_two_chunk([498, 502], THRESHOLD), (1, 498))],
    *[(split_two_chunk([42, 999], THRESHOLD), (1, 520)), (split_two_chunk([999, 42], THRESHOLD), (0, 520))],
    (split_two_chunk([1, 1, 1, 1, 99999], THRESHOLD), (4, 50001)),
    (split_two_chunk([10, 20, 30, 500, 40], THRESHOLD), (3, 300)),
    (split_two_chunk([1, 99], 0.0), (1, 1)),
    (split_two_chunk([1, 99], 0.02), (1, 50)),
    (split_two_chunk([45, 55], 0.45), (1, 45)),  # exactly the threshold is balanced enough
    (split_two_chunk([45, 55], 0.46), (1, 50)),
    (split_two_chunk([49, 51], 0.5), (1, 50)),  # 0.5 cuts whenever the lanes differ
]


@pytest.mark.parametrize(("parts", "expected"), GOLDEN)
def test_golden_splits(parts: Sequence[UBatchSlice], expected: tuple[int, int]) -> None:
    assert indices(parts) == expected


def test_balanced_evens_out_what_the_largest_lane_leaves_open_and_looks_ahead() -> None:
    for lens, expected in (
        ([10, 1, 1, 1, 1], [10, 2, 2]),  # lanes of 10, 3 and 1 tokens would have no larger largest lane
        ([3, 3, 1, 1, 1, 1, 2], [3, 3, 3, 3]),
        ([4, 4, 5, 2, 18, 1], [15, 18, 1]),  # the cut nearest to a third, after 13 of 34, would force a lane of 19
    ):
        assert [part.num_tokens for part in split_balanced(lens, len(expected))] == expected


# -------------------------------------------------------------------------------------------------- the references


@given(st.integers(0, 50), st.integers(1, 6), lane_counts)
def test_fixed_covers_and_is_even(num_requests: int, tokens_per_request: int, lanes: int) -> None:
    parts = split_fixed(num_requests, tokens_per_request, lanes)
    check_covers([tokens_per_request] * num_requests, parts, lanes)
    sizes = [part.num_requests for part in parts]
    assert max(sizes) - min(sizes) <= 1
    if num_requests >= lanes:
        assert not any(part.is_empty() for part in parts)


@given(lengths)
def test_balanced_for_two_lanes_is_the_best_cut_ties_late(lens: list[int]) -> None:
    assert indices(split_balanced(lens))[0] == reference_balanced_index(lens)


@given(lengths, lane_counts)
def test_balanced_has_the_smallest_largest_lane(lens: list[int], lanes: int) -> None:
    parts = split_balanced(lens, lanes)
    check_covers(lens, parts, lanes)
    if len(lens) >= lanes:
        assert all(part.num_requests > 0 for part in parts)
        assert max(part.num_tokens for part in parts) == reference_smallest_largest_lane(lens, lanes)
    if lens and min(lens) > 0 and len(lens) >= lanes:
        assert not any(part.is_empty() for part in parts)


@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_fewer_requests_than_lanes_leave_a_lane_empty(lanes: int) -> None:
    lens = [5] * (lanes - 1)
    parts = split_balanced(lens, lanes)
    check_covers(lens, parts, lanes)
    assert sum(part.is_empty() for part in parts) == 1
    assert all(part.is_empty() for part in split_balanced([], lanes))


@given(st.one_of(lengths, skewed_lengths), thresholds.filter(bool))
def test_two_chunk_equals_the_reference(lens: list[int], threshold: float) -> None:
    first, second = split_two_chunk(lens, threshold)
    check_covers(lens, (first, second), 2)
    assert (first.request_slice.stop, second.request_slice.start, first.num_tokens) == reference_two_chunk(
        lens, threshold
    )


@given(skewed_lengths)
def test_two_chunk_lanes_never_hold_a_request_without_tokens(lens: list[int]) -> None:
    for part in split_two_chunk(lens, 0.5):
        assert part.num_requests == 0 or min(lane_query_lens(lens, part)) > 0


# --------------------------------------------------------------------------------------------- the one entrance


@given(st.one_of(lengths, skewed_lengths), st.booleans(), lane_counts, thresholds)
def test_split_requests_picks_by_mode(lens: list[int], decode: bool, lanes: int, threshold: float) -> None:
    if lanes > 2:
        threshold = 0.0
    if decode:
        lens = [1 + len(lens) % 3] * len(lens)
        expected = split_fixed(len(lens), lens[0] if lens else 1, lanes)
    elif threshold:
        expected = split_two_chunk(lens, threshold)
    else:
        expected = split_balanced(lens, lanes)
    parts = split_requests(lens, decode=decode, num_ubatches=lanes, two_chunk_threshold=threshold)
    assert parts == expected
    check_covers(lens, parts, lanes)


NO_RANGE = [slice(None, 3), slice(0, None), slice(3, 2), slice(-1, 2), slice(0, 4, 2)]
OUT_OF_RANGE = r"two_chunk_threshold must be between 0 \(off\) and 0\.5, not"
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    *[(lambda bad=bad: UBatchSlice(slice(0, 1), bad), SplitError, "token_slice must be") for bad in NO_RANGE],
    *[(lambda bad=bad: UBatchSlice(bad, slice(0, 1)), SplitError, "request_slice must be") for bad in NO_RANGE],
    *[
        (lambda share=share: split_two_chunk([3, 4], share), ConfigError, OUT_OF_RANGE)
        for share in (-0.1, 0.51, 1.0, float("nan"))
    ],
    (lambda: split_requests([1, 1], decode=True, two_chunk_threshold=0.51), ConfigError, OUT_OF_RANGE),
    (lambda: split_two_chunk([3, 4, 5], THRESHOLD, 3), ConfigError, "makes 2 lanes, not 3"),
    (
        lambda: split_requests([3, 4, 5], decode=False, num_ubatches=3, two_chunk_threshold=THRESHOLD),
        ConfigError,
        "makes 2 lanes, not 3",
    ),
    (lambda: split_requests([1, 1], decode=True, num_ubatches=1), ConfigError, "at least 2, not 1"),
    (lambda: split_requests([1, 1, 3], decode=True), SplitError, "request 2 has 3 and request 0 has 1"),
    (lambda: split_balanced([3, -4]), SplitError, "request 1 has -4 tokens"),
    (lambda: split_fixed(-1), SplitError, "num_requests must be at least 0, not -1"),
    (lambda: split_fixed(3, 0), SplitError, "tokens_per_request must be at least 1, not 0"),
    (lambda: split_requests([-2, -2], decode=False), SplitError, "request 0 has -2 tokens"),
    (lambda: split_by_cost([1, 2], [0], SplitCost(1, 0)), SplitError, "2 query lengths and 1 prefix"),
    (lambda: split_by_cost([1, 2], [0, 0], SplitCost(1, 0), 2, 0.6), ConfigError, "0.5, not 0.6"),
    (lambda: split_by_cost([1, 2, 3], [0, 0, 0], SplitCost(1, 0), 3, 0.4), ConfigError, "makes 2 lanes, not 3"),
    (lambda: split_by_cost([1, 2], [0, 0], SplitCost(1, 0), 1), ConfigError, "at least 2"),
    *[(lambda costs=costs: SplitCost(*costs), ConfigError, "costs") for costs in ((-1, 0), (0, -1), (0, 0))],
    (lambda: SplitCost(1, 1, window=0), ConfigError, "window must be at least 1, or None, not 0"),
    (lambda: keep_together(split_balanced([1, 8, 1]), [1, 8, 1], [(1, 3)]), SplitError, "not within the batch's 3"),
]


@pytest.mark.parametrize(("refused", "error", "message"), REFUSED)
def test_what_cannot_be_split_is_refused_by_value(
    refused: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        refused()


# ------------------------------------------------------------------------------------------------------------- by cost


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
    assert max(lane_costs(slices, requests, cost)) <= reference_smallest_largest_lane(weights, lanes) * 1.001


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
