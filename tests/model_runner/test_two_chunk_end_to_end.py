"""Unusual splits through the server's scheduler, with the prefix cache, give the same tokens: one very long prompt that
is cut in two, and decodes in a lane together with prefills.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import checkpoint_fixture
from dense_checkpoint import make_small
from fake_device import run

from model_runner import ModelRunner, SamplingParams, Step
from serving.engine import EngineCore
from serving.requests import RequestInput
from serving.scheduler import Scheduler, SchedulerConfig
from ubatch import ForwardMode, SplitCost, UBatchConfig, UBatchSlice

pytestmark = pytest.mark.long

NEW = 6
BLOCK = 4


def prompts(seed: int) -> list[list[int]]:
    """Four short ones, and one that is nine tenths of the batch. Half of it is the same for every seed."""
    rng, common = random.Random(seed), random.Random(99)
    shared = [common.randrange(1, 380) for _ in range(60)]
    long = shared + [rng.randrange(1, 380) for _ in range(61)]
    return [[rng.randrange(1, 380) for _ in range(length)] for length in (3, 5)] + [long, [7, 8], [9]]


class Watched:
    """A runner whose agreements are noted."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.agreed: list[Step] = []
        agree = runner.agree

        def noted(step: Step, *args: Any, **kwargs: Any) -> Step:
            self.agreed.append(agree(step, *args, **kwargs))
            return self.agreed[-1]

        monkeypatch.setattr(runner, "agree", noted)

    def torn(self) -> Iterator[tuple[UBatchSlice, UBatchSlice]]:
        """The lanes of every step that cut a request."""
        for agreed in self.agreed:
            if agreed.slices is not None:
                first, second = agreed.slices
                if second.request_slice.start < first.request_slice.stop:
                    yield first, second


def serve(runner: ModelRunner, tokens_a_step: int, *, prefix_cache: bool = True) -> list[dict[str, list[int]]]:
    """Two batches, one after the other: the second one's long prompt begins with what is in the cache."""
    config = SchedulerConfig(
        max_num_seqs=6, max_num_batched_tokens=tokens_a_step, max_model_len=160, enable_prefix_caching=prefix_cache
    )
    vocab_size = runner.config.vocab_size
    scheduler = Scheduler(config, runner.allocator, runner.request_table, eos_token_ids=(), vocab_size=vocab_size)
    core = EngineCore(runner, scheduler, overlap_schedule=False)
    greedy = SamplingParams(max_tokens=NEW, ignore_eos=True)
    return [
        run(core, [RequestInput(f"{seed}.{n}", prompt, greedy) for n, prompt in enumerate(prompts(seed))])
        for seed in (0, 1)
    ]


checkpoint = checkpoint_fixture(make_small, dense=False)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[dict[str, list[int]]]:
    with make_runner(checkpoint, UBatchConfig(enable_dbo=False)) as runner:
        return serve(runner, 256, prefix_cache=False)


def make_runner(checkpoint: Path, dbo: UBatchConfig) -> ModelRunner:
    return ModelRunner(checkpoint, num_kv_blocks=120, block_size=BLOCK, max_num_seqs=6, dbo=dbo)


@pytest.mark.sample(3)
@pytest.mark.parametrize("split_by", ["tokens", "cost"])
@pytest.mark.parametrize("tokens_a_step", [256, 48], ids=["whole", "chunked"])
@pytest.mark.parametrize("schedule", ["mlp_shared_overlap", "two_batch_prefill"])
def test_a_very_long_prompt_is_cut_and_gives_the_same_tokens(
    checkpoint: Path,
    expected: list[dict[str, list[int]]],
    schedule: str,
    tokens_a_step: int,
    split_by: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dbo = UBatchConfig(
        dbo_decode_token_threshold=2, dbo_prefill_token_threshold=4, schedule=schedule, split_by=split_by
    )
    with make_runner(checkpoint, dbo) as runner:
        watched = Watched(runner, monkeypatch)
        assert serve(runner, tokens_a_step) == expected
        torn = list(watched.torn())
        assert len(torn) >= 2, "the long prompt of either batch"
        if split_by == "tokens":
            assert all(abs(first.num_tokens - second.num_tokens) <= 1 for first, second in torn)
        cached = [max(step.prefix_lens) for step in watched.agreed if step.shares]
        assert 60 // BLOCK * BLOCK in cached, "the second long prompt starts behind what the first one left"
        assert runner.statistics().engaged >= 2 * NEW


def test_a_lane_of_decodes_beside_a_lane_of_prefills_gives_the_same_tokens(
    checkpoint: Path, expected: list[dict[str, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model would have it whose prefixes are dear to expand: the prompt's chunks are never cut."""
    dbo = UBatchConfig(dbo_decode_token_threshold=2, dbo_prefill_token_threshold=4, split_by="cost")
    with make_runner(checkpoint, dbo) as runner:
        runner.split_cost = SplitCost(1.0, 0.01, per_expanded=10.0)
        watched = Watched(runner, monkeypatch)
        assert serve(runner, 24) == expected
        mixed = [step for step in watched.agreed if step.mode is ForwardMode.MIXED]
        apart = 0
        for step in mixed:
            decodes = sum(length == 1 for length in step.query_lens)
            apart += step.slices is not None and step.slices[0].request_slice == slice(0, decodes)
        assert apart >= 2
