"""Batches of drafts and their split: every offset exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention import CommonAttentionMetadata, SpecVerifyInput, split_attn_metadata
from ubatch import ForwardMode, SplitError, UBatchSlice, split_fixed


def make_spec(prefix_lens: tuple[int, ...], drafts: int, *, mask: bool = True) -> SpecVerifyInput:
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
        custom_mask=torch.arange(entries) % 3 == 0 if mask else None,
        retrieve_index=index,
        retrieve_next_token=torch.arange(rows).view(-1, drafts) % drafts,
        retrieve_next_sibling=torch.full((len(prefix_lens), drafts), -1),
    )


def test_the_golden_split() -> None:
    """Four requests with prefixes of 10, 15, 20 and 25 tokens and 5 drafts: 450 entries, 175 and 275."""
    spec = make_spec((10, 15, 20, 25), 5)
    assert spec.mask_offsets == (0, 75, 175, 300, 450)
    first, second = spec.split(slice(0, 2)), spec.split(slice(2, 4))
    assert first.custom_mask is not None
    assert second.custom_mask is not None
    assert spec.custom_mask is not None
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
        whole, part = spec.mask_of(request), lane.mask_of(place)
        assert whole is not None
        assert part is not None
        assert torch.equal(whole, part)
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
    parts = split_attn_metadata(slices, metadata)
    masks = [part.spec_verify.custom_mask for part in parts if part.spec_verify is not None]
    assert torch.equal(torch.cat([mask for mask in masks if mask is not None]), spec.custom_mask)
    for part, piece in zip(parts, split_fixed(5, 4, lanes), strict=True):
        assert part.mode is ForwardMode.TARGET_VERIFY
        assert part.spec_verify is not None
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
    spec = make_spec((3, 5), 4)
    assert spec.custom_mask is not None
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
