"""Metadata and its split into lanes, field by field; `test_attention_lanes` computes attention in them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from attention_batches import make_batch
from attention_conformance import lanes_between
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import CommonAttentionMetadata, split_attn_metadata
from ubatch import ConfigError, SplitError, UBatchSlice, split_balanced, split_fixed, split_two_chunk

BATCHES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=7)
"""(prefix, new tokens) of each request."""


def test_split_between_requests_is_views() -> None:
    metadata = make_batch([(3, 1), (7, 1), (0, 1), (2, 1)]).metadata
    left, right = split_attn_metadata(split_fixed(4), metadata)
    for lane, rows in ((left, slice(0, 2)), (right, slice(2, 4))):
        assert lane.query_start_loc.tolist() == [0, 1, 2] == list(lane.query_start_loc_cpu)
        assert lane.seq_lens.tolist() == metadata.seq_lens.tolist()[rows] == list(lane.seq_lens_cpu)
        assert (lane.num_reqs, lane.num_actual_tokens, lane.max_query_len) == (2, 2, 1)
        for name in ("seq_lens", "block_table", "slot_mapping"):
            whole, part = getattr(metadata, name), getattr(lane, name)
            assert part.data_ptr() == whole[rows].data_ptr(), name
    assert (left.max_seq_len, right.max_seq_len) == (8, 3)


def test_straddling_request_ends_at_the_cut_and_keeps_its_total_after_it() -> None:
    metadata = make_batch([(0, 2), (4, 10), (0, 3)]).metadata
    left, right = split_attn_metadata(
        [UBatchSlice(slice(0, 2), slice(0, 7)), UBatchSlice(slice(1, 3), slice(7, 15))], metadata
    )
    assert left.query_start_loc_cpu == (0, 2, 7) == tuple(left.query_start_loc.tolist())
    assert left.seq_lens_cpu == (2, 9) == tuple(left.seq_lens.tolist())
    assert right.query_start_loc_cpu == (0, 5, 8) == tuple(right.query_start_loc.tolist())
    assert right.seq_lens_cpu == (14, 3) == tuple(right.seq_lens.tolist())
    assert (left.max_query_len, right.max_query_len) == (5, 5)
    assert metadata.seq_lens.tolist() == [2, 14, 3]  # the batch's own tensor was not written
    assert torch.equal(torch.cat([left.slot_mapping, right.slot_mapping]), metadata.slot_mapping)
    assert torch.equal(left.block_table[1], right.block_table[0])


def test_one_request_over_three_lanes() -> None:
    metadata = make_batch([(2, 9)]).metadata
    lanes = split_attn_metadata(lanes_between([3, 6], metadata), metadata)
    assert [lane.seq_lens_cpu for lane in lanes] == [(5,), (8,), (11,)]
    assert [lane.query_start_loc_cpu for lane in lanes] == [(0, 3)] * 3


def test_empty_lanes_and_an_idle_batch() -> None:
    metadata = make_batch([(0, 1)]).metadata
    empty = UBatchSlice(slice(1, 1), slice(1, 1))
    lanes = split_attn_metadata([UBatchSlice(slice(0, 1), slice(0, 1)), empty, empty], metadata)
    assert [lane.num_actual_tokens for lane in lanes] == [1, 0, 0]
    assert lanes[1].query_start_loc.tolist() == [0]
    assert (lanes[2].num_reqs, lanes[2].max_query_len, lanes[2].max_seq_len) == (0, 0, 0)
    idle = make_batch([]).metadata
    assert [lane.num_reqs for lane in split_attn_metadata(split_fixed(0), idle)] == [0, 0]


def test_padding_requests_and_padding_tokens() -> None:
    padded = make_batch([(3, 2), (0, 4), (0, 0)], padding=3).metadata
    left, right = split_attn_metadata(
        [UBatchSlice(slice(0, 1), slice(0, 2)), UBatchSlice(slice(1, 3), slice(2, 9))], padded
    )
    assert left.num_actual_tokens == 2
    assert right.num_actual_tokens == 4
    assert right.slot_mapping.tolist()[-3:] == [-1, -1, -1]
    assert right.query_start_loc_cpu == (0, 4, 4) == tuple(right.query_start_loc.tolist())


def test_unknown_field_is_an_error() -> None:
    @dataclass(frozen=True)
    class WithMask(CommonAttentionMetadata):
        tree_mask: torch.Tensor | None = None

    plain = make_batch([(0, 1), (0, 1)]).metadata
    metadata = WithMask(**vars(plain))
    with pytest.raises(SplitError, match="tree_mask"):
        split_attn_metadata(split_fixed(2), metadata)


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([((0, 1), (0, 2)), ((1, 2), (3, 5))], "without gaps"),
        ([((0, 1), (0, 2))], "every token needs a lane"),
        ([((0, 1), (0, 3)), ((1, 2), (3, 5))], "do not contain"),
        ([((0, 0), (0, 2)), ((0, 2), (2, 5))], "no request"),
        ([((0, 2), (0, 5)), ((1, 3), (5, 5))], "do not contain"),
        ([((0, 2), (0, 1)), ((0, 2), (1, 5))], "outside of some"),
    ],
)
def test_slices_that_do_not_fit(slices: list[tuple[tuple[int, int], tuple[int, int]]], message: str) -> None:
    metadata = make_batch([(0, 2), (0, 3)]).metadata
    with pytest.raises(SplitError, match=message):
        split_attn_metadata([UBatchSlice(slice(*r), slice(*t)) for r, t in slices], metadata)


@settings(max_examples=20, deadline=None)
@given(requests=BATCHES, num_lanes=st.integers(2, 4), threshold=st.sampled_from([0.0, 0.3, 0.5]))
def test_runtime_splits_are_accepted(requests: list[tuple[int, int]], num_lanes: int, threshold: float) -> None:
    """Whatever `ubatch` cuts, its slices fit, and every token and key is accounted for."""
    metadata = make_batch(requests).metadata
    query_lens = list(metadata.query_lens_cpu)
    splits = [split_balanced(query_lens, num_lanes)]
    if threshold:
        splits.append(split_two_chunk(query_lens, threshold))
    for slices in splits:
        lanes = split_attn_metadata(slices, metadata)
        assert sum(lane.num_actual_tokens for lane in lanes) == metadata.num_actual_tokens
        for lane in lanes:
            assert tuple(lane.query_start_loc.tolist()) == lane.query_start_loc_cpu
            assert tuple(lane.seq_lens.tolist()) == lane.seq_lens_cpu
            assert all(0 < q <= s for q, s in zip(lane.query_lens_cpu, lane.seq_lens_cpu, strict=True))


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "rows", "slots", "message"),
    [
        ([2, 1], [2], 2, 3, "2 query lengths of 3 tokens need .* there are 1, 2 and 3"),
        ([2, 1], [2, 1], 1, 3, "there are 2, 1 and 3"),
        ([2, 1], [2, 1], 2, 2, "there are 2, 2 and 2"),
        ([2, 3], [2, 1], 2, 5, "request 1 has 3 new tokens of 1 in all"),
        ([-1], [4], 1, 0, "request 0 has -1 new tokens"),
    ],
)
def test_sizes_of_different_batches(
    query_lens: list[int], seq_lens: list[int], rows: int, slots: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CommonAttentionMetadata.build(query_lens, seq_lens, torch.zeros(rows, 4).int(), torch.arange(slots))


def test_metadata_is_frozen_and_replaceable() -> None:
    metadata = make_batch([(0, 2)]).metadata
    with pytest.raises(AttributeError):
        metadata.num_reqs = 3  # type: ignore[misc]
    assert replace(metadata, max_seq_len=9).max_seq_len == 9
