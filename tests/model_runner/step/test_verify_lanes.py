"""A thousand random verify batches, in lanes and whole: the same attention, and every part of them cut exactly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from attention_batches import Batch, make_batch
from torch import Tensor

from attention import CommonAttentionMetadata, SpecVerifyInput, UBatchAttention, split_attn_metadata
from model_runner.step.batch import DraftTrees, chain_of_drafts
from ubatch import UBatchSlice, split_fixed

pytestmark = pytest.mark.long

NUM_BATCHES, PARTS = 1000, 8


def random_batch(rng: random.Random, seed: int) -> Batch:
    """1 to 12 requests with 1 to 6 drafts each: chains, trees, or some of both."""
    num_drafts, prefixes = rng.randint(1, 6), [rng.choice((0, 1, 3, 4, rng.randrange(40))) for _ in range(12)]
    prefixes = prefixes[: rng.randint(1, 12)]
    batch = make_batch([(prefix, num_drafts + 1) for prefix in prefixes], drafts="chain", heads=(4, 2, 4), seed=seed)
    chains = rng.choice((0.0, 0.5, 1.0))
    forest: list[tuple[int, ...] | None] = [
        None if rng.random() < chains else tuple(rng.randint(0, draft) for draft in range(num_drafts)) for _ in prefixes
    ]
    tokens = torch.randint(0, 100, (len(prefixes) * (num_drafts + 1),))
    trees = DraftTrees.of(forest, num_drafts)
    if trees is None:
        positions = torch.cat([torch.arange(prefix, prefix + num_drafts + 1) for prefix in prefixes])
        spec = chain_of_drafts(num_drafts, prefixes, tokens, positions)
    else:
        spec = trees.verify_input(prefixes, tokens, trees.positions(prefixes))
    return replace(batch, metadata=replace(batch.metadata, spec_verify=spec))


def random_slices(rng: random.Random, num_requests: int, rows: int) -> Sequence[UBatchSlice]:
    """2 to 4 lanes: evenly, or cut anywhere between requests; lanes may be empty."""
    lanes = rng.randint(2, 4)
    if num_requests >= lanes and rng.random() < 0.5:
        return split_fixed(num_requests, rows, lanes)
    edges = [0, *sorted(rng.randint(0, num_requests) for _ in range(lanes - 1)), num_requests]
    return [UBatchSlice(slice(start, stop), slice(start * rows, stop * rows)) for start, stop in pairwise(edges)]


def lane_by_lane(batch: Batch, slices: Sequence[UBatchSlice], lanes: Sequence[CommonAttentionMetadata]) -> Tensor:
    cache = batch.new_cache()
    plans = UBatchAttention(batch.shape, cache, "torch").plan_lanes(lanes)
    inputs = [[x[piece.token_slice] for x in (batch.q, batch.k, batch.v)] for piece in slices]
    return torch.cat([plan.forward(*own, 0) for plan, own in zip(plans, inputs, strict=True)])


def check_parts(whole: SpecVerifyInput, slices: Sequence[UBatchSlice], parts: Sequence[SpecVerifyInput | None]) -> None:
    """What the lanes know, put together again, is what the batch knows; rows count from the lane's first."""
    real = [(piece, part) for piece, part in zip(slices, parts, strict=True) if part is not None]
    assert sum(part.num_reqs for _, part in real) == whole.num_reqs
    rows, entries = whole.num_draft_tokens, 0
    for piece, part in real:
        requests = piece.request_slice
        prefixes = whole.prefix_lens[requests]
        assert part.prefix_lens == prefixes
        first = requests.start * rows
        assert torch.equal(part.retrieve_index + first, whole.retrieve_index[requests])
        assert torch.equal(part.retrieve_next_token, whole.retrieve_next_token[requests])
        assert torch.equal(part.retrieve_next_sibling, whole.retrieve_next_sibling[requests])
        assert torch.equal(part.positions, whole.positions[first : requests.stop * rows])
        assert torch.equal(part.draft_tokens, whole.draft_tokens[first : requests.stop * rows])
        size = sum((prefix + rows) * rows for prefix in prefixes)
        assert (part.custom_mask is None) == (whole.custom_mask is None)
        if whole.custom_mask is not None and part.custom_mask is not None:
            assert torch.equal(part.custom_mask, whole.custom_mask[entries : entries + size])
        entries += size
    assert whole.custom_mask is None or entries == len(whole.custom_mask)


@pytest.mark.sample(8)
@pytest.mark.parametrize("part", range(PARTS))
def test_in_lanes_as_whole(part: int) -> None:
    rng = random.Random(part)
    trees = cut = 0
    for seed in range(NUM_BATCHES // PARTS):
        batch = random_batch(rng, seed)
        metadata = batch.metadata
        assert metadata.spec_verify is not None
        slices = random_slices(rng, metadata.num_reqs, metadata.spec_verify.num_draft_tokens)
        lanes = split_attn_metadata(slices, metadata)
        check_parts(metadata.spec_verify, slices, [lane.spec_verify for lane in lanes])
        plan = UBatchAttention(batch.shape, batch.new_cache(), "torch").plan(metadata)
        whole = plan.forward(batch.q, batch.k, batch.v, 0)
        torch.testing.assert_close(lane_by_lane(batch, slices, lanes), whole, atol=2e-6, rtol=1e-5)
        if seed % 10 == 0:
            torch.testing.assert_close(whole, batch.expected(), atol=2e-6, rtol=1e-5)
        trees += metadata.has_tree
        cut += sum(bool(lane.num_actual_tokens) for lane in lanes) > 1
    assert trees > NUM_BATCHES / PARTS / 3
    assert cut > NUM_BATCHES / PARTS / 2
