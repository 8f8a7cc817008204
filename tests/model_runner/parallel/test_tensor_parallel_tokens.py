"""Ranks of a replica get the same tokens and drafts, even where what they compute differs."""

from __future__ import annotations

import pytest
import torch
from drafted import generate_drafted
from repository import TINY_MOE
from torch import Tensor

from model_runner import Acceptance, ModelRunner, SamplingParams, generate
from ranks import run_ranks
from serving.engine.speculation import Algorithm, SpeculationConfig, runner_options
from ubatch import CommGroup, UBatchConfig

pytestmark = pytest.mark.ranks

HEAD = TINY_MOE.parent / "tiny-moe-eagle"
PROMPTS = [[(29 * index + 7 * place) % 300 + 3 for place in range(4 + 5 * index)] for index in range(4)]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, logprobs=2)  # unseeded: each rank draws its own
PARAMS = [GREEDY, DRAWN, GREEDY, DRAWN]
DRAFTS = {
    "chains": SpeculationConfig(Algorithm.EAGLE, 3, 3, draft_model_path=HEAD, acceptance=Acceptance.REJECTION),
    "trees": SpeculationConfig(Algorithm.EAGLE, 5, 3, topk=2, draft_model_path=HEAD),
}

LEAST_STEPS = 4
"""A prefill, and three steps for the eleven other tokens if every draft is right, which depends on what is drawn."""


def on_a_rank(rank: int, world_size: int) -> dict[str, list[list[int]]]:
    """The last rank's logits have nothing to do with the model; its drafts and tokens come from them, too."""
    group = CommGroup.from_process_group(timeout_s=20)
    given: dict[str, list[list[int]]] = {}
    for name, drafts in {"plain": None, **DRAFTS}.items():
        with ModelRunner(
            TINY_MOE,
            group=group,
            tensor_parallel_size=2,
            kv_cache_memory=8 << 20,
            max_num_seqs=4,
            dbo=UBatchConfig(dbo_decode_token_threshold=4, dbo_prefill_token_threshold=4),
            **runner_options(drafts),
        ) as runner:
            if rank == 1:
                astray(runner)
            if drafts is None:
                given[name] = [list(output.token_ids) for output in generate(runner, PROMPTS, PARAMS)]
            else:
                given[name] = [output.token_ids for output in generate_drafted(runner, PROMPTS, PARAMS, drafts)]
            assert runner.statistics().engaged >= LEAST_STEPS
    return given


def astray(runner: ModelRunner) -> None:
    vocab_size, noise = runner.config.vocab_size, torch.Generator().manual_seed(1)

    def compute_logits(hidden: Tensor) -> Tensor:
        return torch.randn(len(hidden), vocab_size, generator=noise)

    runner.model.compute_logits = compute_logits  # type: ignore[method-assign]


def test_tokens_and_drafts_are_those_of_the_first_rank() -> None:
    with ModelRunner(TINY_MOE, kv_cache_memory=8 << 20, max_num_seqs=4) as alone:
        wanted = [list(output.token_ids) for output in generate(alone, PROMPTS[::2], GREEDY)]
    first, second = run_ranks(on_a_rank, 2)
    assert first == second
    for name, tokens in first.items():
        assert tokens[::2] == wanted, name
        assert [len(own) for own in tokens] == [12] * 4, name
