"""Metadata and its split into lanes, field by field, also of batches of drafts: every offset exactly.

`test_attention_lanes` computes attention in them.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from attention_batches import make_batch
from attention_conformance import lanes_between
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import CommonAttentionMetadata, SpecVerifyInput, split_attn_metadata
from ubatch import ConfigError, ForwardMode, SplitError, UBatchSlice, split_balanced, split_fixed, split_two_chunk

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


def make_spec(prefix_lens: tuple[int, ...], drafts: int) -> SpecVerifyInput:
    """Every number tells where it came from: draft tokens, positions and mask entries count up over the batch."""
    rows = len(prefix_lens) * drafts
    entries = sum((prefix + drafts) * drafts for prefix in prefix_lens)
    index = torch.arange(rows).view(-1, drafts).clone()
    index[:, -1] = -1  # every tree has one node less than it might
    return SpecVerifyInput(
        num_draft_tokens=drafts,
        prefix_lens=prefix_lens,
        draft_tokens=torch.arange(rows) + 1000,
        positions=torch.arange(rows) + 5,
        custom_mask=torch.arange(entries) % 3 == 0,
        retrieve_index=index,
        retrieve_next_token=torch.arange(rows).view(-1, drafts) % drafts,
        retrieve_next_sibling=torch.full((len(prefix_lens), drafts), -1),
    )


def test_the_golden_split() -> None:
    """Four requests with prefixes of 10, 15, 20 and 25 tokens and 5 drafts: 450 entries, 175 and 275."""
    spec: Any = make_spec((10, 15, 20, 25), 5)
    assert spec.mask_offsets == (0, 75, 175, 300, 450)
    first, second = spec.split(slice(0, 2)), spec.split(slice(2, 4))
    assert (first.custom_mask.numel(), second.custom_mask.numel()) == (175, 275)
    assert torch.equal(torch.cat((first.custom_mask, second.custom_mask)), spec.custom_mask)
    assert second.draft_tokens.tolist() == list(range(1010, 1020))
    assert second.positions.tolist() == list(range(15, 25))
    assert second.prefix_lens == (20, 25)
    # rebased to the lane's own rows, with -1 left alone; node numbers within a request stay
    assert second.retrieve_index.tolist() == [[0, 1, 2, 3, -1], [5, 6, 7, 8, -1]]
    assert first.retrieve_index.tolist() == second.retrieve_index.tolist()
    assert torch.equal(second.retrieve_next_token, spec.retrieve_next_token[2:])
    for request in range(4):
        lane, place = (first, request) if request < 2 else (second, request - 2)
        assert torch.equal(spec.mask_of(request), lane.mask_of(place))
    # views: nothing but the indices is copied
    for name in ("custom_mask", "draft_tokens", "positions", "retrieve_next_token"):
        ours, whole_tensor = getattr(second, name), getattr(spec, name)
        assert ours.untyped_storage().data_ptr() == whole_tensor.untyped_storage().data_ptr()


def batch(spec: SpecVerifyInput, padding_requests: int = 0) -> CommonAttentionMetadata:
    drafts, count = spec.num_draft_tokens, spec.num_reqs
    return CommonAttentionMetadata.build(
        [drafts] * count + [0] * padding_requests,
        [prefix + drafts for prefix in spec.prefix_lens] + [0] * padding_requests,
        torch.zeros(count + padding_requests, 8, dtype=torch.int32),
        torch.arange(count * drafts),
        ForwardMode.TARGET_VERIFY,
        spec,
    )


@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("padding", [0, 2])
def test_metadata_takes_its_part_along(lanes: int, padding: int) -> None:
    spec = make_spec((3, 0, 7, 1, 4), 4)
    metadata = batch(spec, padding)
    slices = list(split_fixed(5, 4, lanes))
    if padding:
        last = slices[-1]
        slices[-1] = UBatchSlice(slice(last.request_slice.start, 5 + padding), last.token_slice)
    parts: list[Any] = split_attn_metadata(slices, metadata)
    assert torch.equal(torch.cat([part.spec_verify.custom_mask for part in parts]), spec.custom_mask)
    for part, piece in zip(parts, split_fixed(5, 4, lanes), strict=True):
        assert part.mode is ForwardMode.TARGET_VERIFY
        assert part.spec_verify.num_reqs == piece.num_requests
        assert part.query_lens_cpu[: piece.num_requests] == (4,) * piece.num_requests


def test_an_empty_lane_has_no_drafts() -> None:
    metadata = batch(make_spec((3,), 4))
    empty, full = split_attn_metadata(
        [UBatchSlice(slice(0, 0), slice(0, 0)), UBatchSlice(slice(0, 1), slice(0, 4))], metadata
    )
    assert (empty.mode, empty.spec_verify) == (ForwardMode.IDLE, None)
    assert full.spec_verify is not None


def test_a_tree_is_never_torn() -> None:
    metadata = batch(make_spec((3, 5), 4))
    torn = [UBatchSlice(slice(0, 1), slice(0, 2)), UBatchSlice(slice(0, 2), slice(2, 8))]
    with pytest.raises(SplitError, match="inside a request: its tree would be torn"):
        split_attn_metadata(torn, metadata)


def test_sizes_that_contradict_each_other() -> None:
    spec: Any = make_spec((3, 5), 4)
    for name, value, message in (
        ("custom_mask", spec.custom_mask[1:], r"custom_mask .* must be \[64\], not \[63\]"),
        ("custom_mask", spec.custom_mask.int(), "must be bool, not torch.int32"),
        ("positions", spec.positions[1:], r"positions .* must be \[8\]"),
        ("num_draft_tokens", 0, "at least one draft token"),
    ):
        with pytest.raises(SplitError, match=message):
            replace(spec, **{name: value})
    with pytest.raises(SplitError, match="spec_verify has 2 requests of 4 drafts"):
        CommonAttentionMetadata.build(
            [4, 4], [7, 8], torch.zeros(2, 1), torch.arange(8), ForwardMode.TARGET_VERIFY, spec
        )
