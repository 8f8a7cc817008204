"""Generation on one rank: scheduling, KV accounting, stops, sampling, overlap in lanes, and refused requests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint_fixture, load_reference, reference_greedy

from attention import KVCacheExhausted
from model_runner import FinishReason, ModelRunner, Request, RequestError, SamplingParams, ScheduledRequest, generate
from ubatch import DeclineReason, OverlapDeclined, UBatchConfig

pytestmark = pytest.mark.long

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [53], [58, 97, 93, 23, 84], [62, 64, 33] * 7, [100] * 4]


checkpoint = checkpoint_fixture(num_hidden_layers=2)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[int, ...]]:
    reference = load_reference(checkpoint)
    return [tuple(reference_greedy(reference, prompt, 12)[0]) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> Iterator[ModelRunner]:
    with ModelRunner(checkpoint, num_kv_blocks=40, block_size=4, max_num_seqs=8) as runner:
        yield runner


def tokens_of(runner: ModelRunner, *args: Any, **kwargs: Any) -> list[tuple[int, ...]]:
    outputs = [output.token_ids for output in generate(runner, *args, **kwargs)]
    runner.allocator.check(idle=True)
    assert runner.request_table.num_free_rows == 8
    return outputs


GREEDY = SamplingParams(max_tokens=12)


def test_greedy_equals_transformers(runner: ModelRunner, expected: list[tuple[int, ...]]) -> None:
    outputs = generate(runner, PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert [list(output.prompt_token_ids) for output in outputs] == PROMPTS
    assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}


@pytest.mark.parametrize("budget", [1, 3, 7, 100])
def test_prefill_budget_changes_nothing(runner: ModelRunner, expected: list[tuple[int, ...]], budget: int) -> None:
    assert tokens_of(runner, PROMPTS, GREEDY, max_num_batched_tokens=budget) == expected


def test_prompts_wait_for_kv(checkpoint: Path, expected: list[tuple[int, ...]]) -> None:
    """Blocks for one long request, or two short ones, at a time; and then rows for one only."""
    with ModelRunner(checkpoint, num_kv_blocks=9, block_size=4, max_num_seqs=8) as runner:
        assert tokens_of(runner, PROMPTS, GREEDY) == expected
    with ModelRunner(checkpoint, num_kv_blocks=40, block_size=4, max_num_seqs=1) as runner:
        assert [output.token_ids for output in generate(runner, PROMPTS, GREEDY)] == expected


def test_stop_tokens(runner: ModelRunner, expected: list[tuple[int, ...]]) -> None:
    stop = expected[0][4]
    first = expected[0].index(stop)
    (output,) = generate(runner, PROMPTS[:1], SamplingParams(max_tokens=12, stop_token_ids=(stop,)))
    assert output.token_ids == expected[0][: first + 1]
    assert output.finish_reason is FinishReason.STOP


def test_each_prompt_its_own_parameters(runner: ModelRunner, expected: list[tuple[int, ...]]) -> None:
    params = [SamplingParams(max_tokens=count) for count in (1, 12, 5, 2, 9)]
    outputs = tokens_of(runner, PROMPTS, params)
    assert outputs == [tokens[: param.max_tokens] for tokens, param in zip(expected, params, strict=True)]


def test_sampling_is_seeded_per_request(runner: ModelRunner) -> None:
    params = [SamplingParams(temperature=1.5, top_k=50, seed=seed, max_tokens=12) for seed in range(5)]
    together = tokens_of(runner, PROMPTS, params)
    assert together == tokens_of(runner, PROMPTS, params)
    assert together[2:3] == tokens_of(runner, PROMPTS[2:3], params[2:3])
    others = [SamplingParams(temperature=1.5, top_k=50, seed=seed + 9, max_tokens=12) for seed in range(5)]
    assert together != tokens_of(runner, PROMPTS, others)
    unseeded = SamplingParams(temperature=1.5, max_tokens=12)
    assert tokens_of(runner, PROMPTS, unseeded) != tokens_of(runner, PROMPTS, unseeded)


def test_tokens_are_reported_as_they_come(runner: ModelRunner, expected: list[tuple[int, ...]]) -> None:
    seen: list[list[int]] = [[] for _ in PROMPTS]
    tokens_of(runner, PROMPTS, GREEDY, on_token=lambda index, token: seen[index].append(token))
    assert [tuple(tokens) for tokens in seen] == expected


@pytest.mark.parametrize(
    ("num_ubatches", "schedule"),
    [
        (2, "mlp_shared_overlap"),
        (2, "two_batch_decode"),
        (2, "two_batch_prefill"),
        (3, "mlp_shared_overlap"),
        (4, "two_batch_decode"),
    ],
)
def test_lanes_change_nothing(
    checkpoint: Path, expected: list[tuple[int, ...]], num_ubatches: int, schedule: str, no_thread_leaks: None
) -> None:
    """Overlap on one rank: every step in lanes, requests cut in two where there are two lanes."""
    thresholds = dict.fromkeys(("dbo_decode_token_threshold", "dbo_prefill_token_threshold"), num_ubatches)
    dbo = UBatchConfig(num_ubatches=num_ubatches, schedule=schedule, tbo_token_distribution_threshold=0.5, **thresholds)
    with ModelRunner(checkpoint, num_kv_blocks=40, block_size=4, max_num_seqs=8, dbo=dbo) as runner:
        assert tokens_of(runner, PROMPTS, GREEDY) == expected
        statistics = runner.statistics()
        assert (statistics.engaged, statistics.declined) == (12, {})
        assert statistics.handoffs >= 12 * 2 * num_ubatches
        if num_ubatches == 2:  # one prompt alone is cut; one decode alone cannot be
            assert tokens_of(runner, PROMPTS[3:4], GREEDY) == expected[3:4]
            assert runner.statistics().engaged == 13
            assert runner.statistics().declined == {DeclineReason.BELOW_DECODE_THRESHOLD: 11}


def test_required_overlap_that_is_declined(checkpoint: Path) -> None:
    with (
        ModelRunner(checkpoint, num_kv_blocks=40, dbo=UBatchConfig(require_overlap=True)) as runner,
        pytest.raises(OverlapDeclined, match="below_prefill_threshold"),
    ):
        generate(runner, PROMPTS, GREEDY)


@pytest.mark.parametrize(
    ("prompts", "params", "error", "message"),
    [
        ([[1], []], GREEDY, RequestError, "prompt 1 is empty"),
        ([[1, 131]], GREEDY, RequestError, "token 131; the vocabulary is 0 to 130"),
        ([[1, -1]], GREEDY, RequestError, "token -1"),
        ([[1] * 250], GREEDY, RequestError, "262 in all, more than the model's 256 positions"),
        ([[1] * 150], GREEDY, KVCacheExhausted, "needs 41 KV blocks for 162 tokens, the cache has 40"),
        ([[1], [2]], [GREEDY], RequestError, "1 sampling parameters for 2 prompts"),
    ],
)
def test_requests_that_cannot_be_served(
    runner: ModelRunner, prompts: list[list[int]], params: Any, error: type[Exception], message: str
) -> None:
    calls = runner.statistics().calls
    with pytest.raises(error, match=message):
        generate(runner, prompts, params)
    assert runner.statistics().calls == calls  # nothing ran
    runner.allocator.check(idle=True)


def test_prefill_budget_of_nothing(runner: ModelRunner) -> None:
    with pytest.raises(RequestError, match="max_num_batched_tokens"):
        generate(runner, PROMPTS, GREEDY, max_num_batched_tokens=0)


def test_nobody_to_generate_for(runner: ModelRunner) -> None:
    calls = runner.statistics().calls
    assert generate(runner, [], GREEDY) == []
    assert runner.statistics().calls == calls


def test_a_failed_step_gives_the_kv_back(checkpoint: Path, expected: list[tuple[int, ...]]) -> None:
    with ModelRunner(checkpoint, num_kv_blocks=40, block_size=4, max_num_seqs=8) as runner:

        def stop(index: int, token: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            generate(runner, PROMPTS, GREEDY, on_token=stop)
        assert tokens_of(runner, PROMPTS, GREEDY) == expected


def test_admit_reserve_release(runner: ModelRunner) -> None:
    request, other = Request("a", [1, 2, 3], GREEDY), Request("b", [4], GREEDY)
    runner.admit(request, 3)
    assert runner.free_kv_tokens == 39 * 4
    runner.reserve(request, 4)
    assert runner.free_kv_tokens == 39 * 4
    runner.reserve(request, 5)
    runner.reserve(other, 5)
    assert runner.free_kv_tokens == 36 * 4
    with pytest.raises(KVCacheExhausted, match="36 of 40 free"):
        runner.reserve(request, 39 * 4)
    with pytest.raises(KVCacheExhausted, match="longest sequence"):
        runner.admit(Request("c", [1], GREEDY), 257)
    output = runner.execute([ScheduledRequest(request, 3), ScheduledRequest(other, 1)])
    assert len(output.tokens) == 2
    assert not output.all_idle
    assert output.decision.tokens == ((4,),)
    for done in (request, other):
        runner.release(done)
        runner.release(done)
    runner.allocator.check(idle=True)
