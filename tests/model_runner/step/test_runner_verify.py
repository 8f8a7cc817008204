"""Drafts that are verified: the same tokens as without, whatever the drafts are, sampled or not, in lanes or not.

And a thousand random verify batches, in lanes and whole: the same attention, and every part of them cut exactly.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_batches import Batch, make_batch
from checkpoints import make_checkpoint
from speculating import NEW, PARAMS, PROMPTS, Drafting, chain, check, speculate, tree
from torch import Tensor

from attention import CommonAttentionMetadata, KVCacheExhausted, SpecVerifyInput, UBatchAttention, split_attn_metadata
from model_runner import (
    PENDING_TOKEN,
    ModelRunner,
    Request,
    RequestError,
    SamplingParams,
    ScheduledRequest,
    build_input_batch,
    generate,
)
from model_runner.step.batch import DraftTrees, chain_of_drafts
from ubatch import DeclineReason, ForwardMode, UBatchConfig, UBatchSlice, split_fixed

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=["Qwen3Moe", "DeepseekV2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("verify"), request.param, num_hidden_layers=2)


def make_runner(checkpoint: Path, **dbo: Any) -> ModelRunner:
    return ModelRunner(checkpoint, num_kv_blocks=120, block_size=4, max_num_seqs=6, dbo=UBatchConfig(**dbo))


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> Iterator[ModelRunner]:
    with make_runner(checkpoint, enable_dbo=False) as runner:
        yield runner


@pytest.fixture(scope="module")
def expected(runner: ModelRunner) -> list[list[int]]:
    return [list(output.token_ids) for output in generate(runner, PROMPTS, PARAMS)]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("num_drafts", "right"), [(2, 0.9), (5, 0.8), (12, 1.0)])
def test_same_tokens_with_trees(
    runner: ModelRunner, expected: list[list[int]], num_drafts: int, right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted drafts lie apart, and are moved."""
    moved = []
    move = runner.kv_cache.move

    def counted(sources: Tensor, targets: Tensor) -> None:
        moved.append(len(sources))
        move(sources, targets)

    monkeypatch.setattr(runner.kv_cache, "move", counted)
    tokens, logprobs, steps = speculate(runner, expected, num_drafts, tree(num_drafts, right))
    check(tokens, expected)
    assert steps < NEW - 1
    assert moved
    (plain,) = generate(runner, PROMPTS[2:3], PARAMS[2])
    assert plain.logprobs is not None
    for score, wanted in zip(logprobs[2], plain.logprobs[1:], strict=False):
        assert (score.token, [token for token, _ in score.top]) == (wanted.token, [token for token, _ in wanted.top])
        assert score.logprob == pytest.approx(wanted.logprob, abs=1e-4)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("num_drafts", "right"), [(1, 0.5), (3, 0.0), (3, 0.7), (4, 1.0), (7, 0.9)])
def test_same_tokens_as_without(runner: ModelRunner, expected: list[list[int]], num_drafts: int, right: float) -> None:
    tokens, logprobs, steps = speculate(runner, expected, num_drafts, chain(num_drafts, right))
    check(tokens, expected)
    assert [len(scores) > 0 for scores in logprobs] == [False, False, True, False, False]
    for token, score in zip(tokens[2][1:], logprobs[2], strict=False):
        assert (score.token, len(score.top)) == (token, 2)
    if right == 1.0 and all(len(wanted) == NEW for wanted in expected):
        assert steps == -(-(NEW - 1) // (num_drafts + 1))
    if right == 0.0:
        assert steps > (NEW - 1) / 2


@pytest.mark.sample(3)
@pytest.mark.parametrize(("drafting", "num_drafts"), [(chain, 1), (chain, 3), (tree, 5)])
def test_in_lanes(
    checkpoint: Path,
    expected: list[list[int]],
    drafting: Callable[[int, float], Drafting],
    num_drafts: int,
    no_thread_leaks: None,
) -> None:
    """Split between requests, as the modes' table says."""
    with make_runner(checkpoint, dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2) as split:
        tokens, _, steps = speculate(split, expected, num_drafts, drafting(num_drafts, 0.6))
        check(tokens, expected)
        statistics = split.statistics()
        lonely = statistics.declined.get(DeclineReason.LAST_UBATCH_EMPTY, 0)  # one request alone is not cut
        assert statistics.engaged == steps + 1 - lonely
        assert statistics.engaged > steps / 2


def test_a_verify_batch(runner: ModelRunner) -> None:
    requests = [Request(index, PROMPTS[index][:4], SamplingParams()) for index in (0, 2)]
    for request in requests:
        runner.admit(request, 8)
        request.num_computed_tokens = 3
    shares = [ScheduledRequest(request, 1, (71, 72)) for request in requests]
    batch = build_input_batch(shares, runner.request_table, runner.kv_cache.spec)
    assert batch.mode is ForwardMode.TARGET_VERIFY
    assert batch.input_ids.tolist() == [1, 71, 72, 23, 71, 72]
    assert batch.positions.tolist() == [3, 4, 5] * 2
    assert batch.logits_rows.tolist() == list(range(6))
    assert batch.future_places.tolist() == []
    assert batch.metadata.seq_lens.tolist() == [6, 6]
    spec = batch.metadata.spec_verify
    assert spec is not None
    assert (spec.num_draft_tokens, spec.prefix_lens, spec.custom_mask) == (3, (3, 3), None)
    assert spec.retrieve_index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert spec.retrieve_next_token.tolist() == [[1, 2, -1]] * 2
    assert spec.retrieve_next_sibling.tolist() == [[-1] * 3] * 2

    row = requests[0].row
    assert row is not None
    wrong: list[tuple[list[ScheduledRequest], type[Exception], str]] = [
        ([ScheduledRequest(requests[0], 1, (1,)), shares[1]], RequestError, r"have \[1, 2\] drafts"),
        ([shares[0], ScheduledRequest(requests[1], 1)], RequestError, r"have \[0, 2\] drafts"),
        ([ScheduledRequest(requests[0], 1, (1, -1))], RequestError, "has draft -1; it is no token"),
        ([ScheduledRequest(requests[0], 1, (1,) * 5)], KVCacheExhausted, "blocks for 8 tokens and needs 9"),
    ]
    for bad, error, message in wrong:
        with pytest.raises(error, match=message):
            runner.launch(bad)
    requests[0].num_computed_tokens = 2
    for num_tokens in (1, 2):
        with pytest.raises(RequestError, match=f"{num_tokens} tokens in this step and 2 to run"):
            runner.launch([ScheduledRequest(requests[0], num_tokens, (1,))])
    requests[0].advance(2, PENDING_TOKEN)
    with pytest.raises(RequestError, match="drafts behind a token that is not known yet"):
        runner.launch([ScheduledRequest(requests[0], 1, (1,))])
    for request in requests:
        runner.release(request)


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
