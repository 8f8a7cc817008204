"""Which steps are captured, and which graph a step is padded to: numbers only, no graph and no model."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.step.graph_sizes import GraphFamily, GraphShape, capture_sizes, graph_families, tokens_needed
from ubatch import ConfigError, Decision, ForwardMode, UBatchConfig, split_fixed

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY


def config(lanes: int = 2, threshold: int = 4, **options: Any) -> UBatchConfig:
    return UBatchConfig(num_ubatches=lanes, dbo_decode_token_threshold=threshold, **options)


@pytest.mark.parametrize(
    ("max_num_seqs", "largest", "sizes"),
    [
        (1, None, (1,)),
        (3, None, (1, 2, 3)),
        (20, None, (1, 2, 4, 8, 16, 20)),
        (256, None, (1, 2, 4, *range(8, 257, 8))),
        (300, None, (1, 2, 4, *range(8, 256, 8), 256, 272, 288, 300)),
        (4096, None, (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))),
        (4096, 24, (1, 2, 4, 8, 16, 24)),
        (4096, 600, (1, 2, 4, *range(8, 256, 8), *range(256, 593, 16), 600)),
    ],
)
def test_default_sizes(max_num_seqs: int, largest: int | None, sizes: tuple[int, ...]) -> None:
    assert capture_sizes(max_num_seqs, None, largest) == sizes


def test_sizes_that_were_asked_for() -> None:
    assert capture_sizes(8, [4, 2, 4]) == (2, 4)
    assert capture_sizes(8, [4, 2], 4) == (2, 4)


@pytest.mark.parametrize(
    ("sizes", "largest", "complaint"),
    [
        ([], None, "is empty"),
        ([0, 4], None, "from 1 on, not 0"),
        ([True], None, "not True"),
        ([2.0], None, "not 2.0"),
        ([4, 9], None, r"has 9, above max_num_seqs \(8\)"),
        ([4, 6], 5, r"has 6, above max_cudagraph_capture_size \(5\)"),
        (None, 0, "at least 1, not 0"),
    ],
)
def test_sizes_that_cannot_be(sizes: Any, largest: int | None, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        capture_sizes(8, sizes, largest)


def test_lanes_are_captured_where_a_padded_step_may_overlap() -> None:
    (family,) = graph_families([1, 2, 3, 4, 9], config(threshold=4))
    assert family.shapes == (
        *(GraphShape(size, 1, 1, DECODE) for size in (1, 2)),
        GraphShape(2, 2, 1, DECODE),  # of size 4; 3 is below the threshold
        *(GraphShape(size, 1, 1, DECODE) for size in (3, 4)),
        GraphShape(5, 2, 1, DECODE),  # of size 9, rounded up
        GraphShape(9, 1, 1, DECODE),
    )
    assert (family.max_requests(), family.max_requests(plain=True)) == (10, 9)


@pytest.mark.parametrize("options", [{"enable_dbo": False}, {"schedule": "serial"}])
def test_without_overlap_everything_is_plain(options: dict[str, Any]) -> None:
    (family,) = graph_families([4, 8], config(**options))
    assert [shape.lanes for shape in family.shapes] == [1, 1]


def test_verify_steps_are_a_family_of_their_own() -> None:
    decode, verify = graph_families([1, 2, 8], config(threshold=8), num_speculative_tokens=3)
    assert (verify.mode, verify.tokens_per_request) == (VERIFY, 4)
    assert [(s.lane_requests, s.lanes, s.num_tokens) for s in verify.shapes] == [
        (1, 1, 4),
        (1, 2, 8),  # 2 requests of 4 tokens are at the threshold; as decodes they are not
        (2, 1, 8),
        (4, 2, 32),
        (8, 1, 32),
    ]
    assert [(s.lane_requests, s.lanes) for s in decode.shapes] == [(1, 1), (2, 1), (4, 2), (8, 1)]
    assert decode.fingerprint != verify.fingerprint


def test_what_ranks_must_agree_on_is_in_the_fingerprint() -> None:
    def fingerprint(sizes: list[int], **options: Any) -> int:
        return graph_families(sizes, config(**options))[0].fingerprint

    same = fingerprint([2, 4])
    assert same == fingerprint([2, 4])
    assert len({same, fingerprint([2, 8]), fingerprint([2, 4], threshold=5), fingerprint([2, 4], lanes=3)}) == 4


def test_slices_of_a_shape_cover_its_rows() -> None:
    assert GraphShape(3, 1, 4, VERIFY).slices is None
    first, second = GraphShape(3, 2, 4, VERIFY).slices or ()
    assert (first.request_slice, first.token_slice) == (slice(0, 3), slice(0, 12))
    assert (second.request_slice, second.token_slice) == (slice(3, 6), slice(12, 24))


def chosen(family: GraphFamily, ranks: list[int], lanes: int) -> GraphShape | None:
    """The shape for ranks with so many requests, split as the runner splits decodes."""
    per_request = family.tokens_per_request
    if lanes == 1:
        tokens = tuple((requests * per_request,) for requests in ranks)
    else:
        tokens = tuple(tuple(s.num_tokens for s in split_fixed(requests, per_request, lanes)) for requests in ranks)
    return family.fit(*tokens_needed(Decision(lanes > 1, None, None, tokens)))


@given(
    st.sets(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(0, 3),
    st.lists(st.integers(0, 45), min_size=1, max_size=3),
)
def test_every_step_up_to_the_largest_size_has_a_graph_with_room(
    sizes: set[int], lanes: int, drafts: int, ranks: list[int]
) -> None:
    settings = config(max(2, lanes), 2 * max(2, lanes), enable_dbo=lanes > 1)
    family = graph_families(sorted(sizes), settings, drafts)[-1]
    per_request = family.tokens_per_request
    busy = [requests for requests in ranks if requests]
    if not busy:
        return
    # Ranks overlap only if every busy one is large enough and fills its lanes.
    overlaps = lanes > 1 and min(busy) >= lanes and min(busy) * per_request >= settings.dbo_decode_token_threshold
    shape = chosen(family, ranks, lanes if overlaps else 1)
    if max(ranks) > max(sizes):
        assert not overlaps or shape is None or shape.num_tokens >= max(ranks) * per_request
        assert overlaps or shape is None
        return
    assert shape is not None
    shares = lanes if overlaps else 1
    needed = -(-max(ranks) // shares)
    assert shape.lane_requests == min(each for size in sizes if (each := -(-size // shares)) >= needed)
    for requests in ranks:
        parts = split_fixed(requests, per_request, lanes) if overlaps else ()
        assert all(part.num_requests <= shape.lane_requests for part in parts)


def test_lanes_that_a_moved_cut_made_uneven_take_a_larger_graph() -> None:
    (family,) = graph_families([4, 8], config(threshold=4))
    assert family.fit(2, 2) == GraphShape(2, 2, 1, DECODE)
    assert family.fit(2, 3) == GraphShape(4, 2, 1, DECODE)
    assert family.fit(2, 5) is None
    assert family.fit(3, 1) is None
