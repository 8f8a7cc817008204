"""Drafts that are verified: the same tokens as without, whatever the drafts are, sampled or not, in lanes or not."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from attention import KVCacheExhausted
from model_runner import (
    PENDING_TOKEN,
    ModelRunner,
    Request,
    RequestError,
    SamplingParams,
    ScheduledRequest,
    TokenLogprobs,
    build_input_batch,
    generate,
)
from model_runner.verify import accepted_tokens
from ubatch import DeclineReason, ForwardMode, UBatchConfig

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [53], [58, 97, 93, 23, 84], [62, 64, 33] * 7, [100] * 4]
NEW = 12
PARAMS = [
    SamplingParams(max_tokens=NEW),
    SamplingParams(max_tokens=NEW, temperature=1.2, seed=3, top_p=0.95),
    SamplingParams(max_tokens=NEW, frequency_penalty=1.0, repetition_penalty=1.3, logprobs=2),
    SamplingParams(max_tokens=NEW, temperature=0.8, seed=8, presence_penalty=1.0, min_p=0.01),
    SamplingParams(max_tokens=NEW, min_tokens=6, stop_token_ids=(11, 12, 13), logit_bias=((40, 2.0),)),
]


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


def speculate(
    runner: ModelRunner, expected: Sequence[Sequence[int]], num_drafts: int, right: float, seed: int = 0
) -> tuple[list[list[int]], list[list[TokenLogprobs]], int]:
    """Prefill, then verify steps only, each draft right with this probability: tokens, log-probabilities, steps."""
    rng = random.Random(seed)
    requests = [
        Request(index, prompt, param) for index, (prompt, param) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]
    logprobs: list[list[TokenLogprobs]] = [[] for _ in requests]
    for request in requests:
        runner.admit(request, request.num_tokens + NEW + num_drafts + 1)
    output = runner.execute([ScheduledRequest(request, request.num_tokens) for request in requests])
    for request, (token,) in zip(requests, output.tokens, strict=True):
        request.advance(request.num_tokens, token)
    steps = 0
    while running := [request for request in requests if len(request.output_token_ids) < NEW]:
        shares = []
        for request in running:
            known = [*expected[int(request.request_id)], *[0] * NEW][len(request.output_token_ids) :]
            drafts = tuple(token if rng.random() < right else rng.randrange(131) for token in known[:num_drafts])
            shares.append(ScheduledRequest(request, 1, drafts))
        output = runner.execute(shares)
        steps += 1
        for share, tokens, scores in zip(shares, output.tokens, output.logprobs, strict=True):
            assert 1 <= len(tokens) <= num_drafts + 1
            assert tokens[:-1] == share.drafts[: len(tokens) - 1]
            share.request.token_ids += tokens
            share.request.num_computed_tokens += len(tokens)
            logprobs[int(share.request.request_id)] += scores
    for request in requests:
        runner.release(request)
    runner.allocator.check(idle=True)
    return [request.output_token_ids[:NEW] for request in requests], logprobs, steps


def check(tokens: list[list[int]], expected: list[list[int]]) -> None:
    for got, wanted in zip(tokens, expected, strict=True):
        assert got[: len(wanted)] == wanted  # a stop token ends `generate`


@pytest.mark.parametrize(("num_drafts", "right"), [(1, 0.5), (3, 0.0), (3, 0.7), (4, 1.0), (7, 0.9)])
def test_same_tokens_as_without(runner: ModelRunner, expected: list[list[int]], num_drafts: int, right: float) -> None:
    tokens, logprobs, steps = speculate(runner, expected, num_drafts, right)
    check(tokens, expected)
    assert [len(scores) > 0 for scores in logprobs] == [False, False, True, False, False]
    for token, score in zip(tokens[2][1:], logprobs[2], strict=False):
        assert (score.token, len(score.top)) == (token, 2)
    if right == 1.0 and all(len(wanted) == NEW for wanted in expected):
        assert steps == -(-(NEW - 1) // (num_drafts + 1))
    if right == 0.0:
        assert steps > (NEW - 1) / 2


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_in_lanes(checkpoint: Path, expected: list[list[int]], num_drafts: int, no_thread_leaks: None) -> None:
    """Split between requests, as the modes' table says."""
    with make_runner(checkpoint, dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2) as split:
        tokens, _, steps = speculate(split, expected, num_drafts, 0.6)
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


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.data())
def test_accepted_drafts(drafts: list[int], data: st.DataObject) -> None:
    sampled = data.draw(st.lists(st.integers(0, 2), min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    got = accepted_tokens(drafts, sampled)
    right = len(got) - 1
    assert list(got) == [*drafts[:right], sampled[right]]
    assert right == len(drafts) or drafts[right] != sampled[right]
