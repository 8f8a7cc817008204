"""Speculation on two ranks that share experts, overlapped: the same tokens, and a census of the verify steps."""

from dataclasses import replace
from typing import Any

import pytest
from engine_mains import core_over
from fake_proposer import FakeProposer, oracle
from repository import TINY_MOE

from model_runner import ModelRunner, SamplingParams
from ranks import run_ranks
from serving import LLM
from serving.engine.speculation import Algorithm, SpeculationConfig
from serving.requests import RequestInput
from serving.workbench.bench.runtime.speculation import census_of, take_census
from ubatch import CommGroup, UBatchConfig

pytestmark = pytest.mark.ranks

HEAD = TINY_MOE.parent / "tiny-moe-eagle"
THRESHOLD = 8  # two requests with three drafts each; one alone cannot be cut
NEW = 40

CONFIGS = {
    "plain": UBatchConfig(enable_dbo=False),
    "lanes": UBatchConfig(dbo_decode_token_threshold=THRESHOLD, dbo_prefill_token_threshold=16),
}


def run(runner: ModelRunner, rank: int, proposer: FakeProposer | None) -> tuple[list[list[int]], dict[str, int]]:
    """Four prompts of this rank's own, greedy, until both ranks are done."""
    core = core_over(
        runner,
        proposer=proposer,
        max_num_seqs=8,
        max_model_len=128,
        enable_prefix_caching=False,  # the next scheduler over this runner would not know what it keeps
        num_speculative_tokens=3 if proposer else 0,
    )
    for index in range(4):
        prompt = [(37 * rank + 11 * index + 5 * place) % 200 + 3 for place in range(6 + 3 * index)]
        core.add(RequestInput(str(index), prompt, SamplingParams(max_tokens=NEW + 3 * rank, ignore_eos=True)))
    tokens: list[list[int]] = [[] for _ in range(4)]
    while core.has_work or not core.idle:
        for output in core.step():
            tokens[int(output.request_id)] += output.token_ids
    core.scheduler.check(idle=True)
    return tokens, dict(core.statistics().steps)


def on_a_rank(rank: int, world_size: int) -> dict[str, Any]:
    group = CommGroup.from_process_group()
    results: dict[str, Any] = {}
    for name, dbo in CONFIGS.items():
        with ModelRunner(TINY_MOE, group=group, kv_cache_memory=8 << 20, max_num_seqs=8, dbo=dbo) as runner:
            wanted, steps = run(runner, rank, None)
            results[name] = wanted, steps
            for trees in (False, True):
                tokens, steps = run(runner, rank, oracle(wanted, 200, trees=trees, seed=rank))
                results[f"{name}/{'trees' if trees else 'chains'}"] = tokens, steps
    return results


@pytest.mark.slow
def test_ranks_overlap_their_verify_steps_and_give_the_same_tokens() -> None:
    first, second = run_ranks(on_a_rank, 2)
    for name in first:
        assert first[name][0] == first["plain"][0], name
        assert second[name][0] == second["plain"][0], name
        engaged, above = census_of((first[name][1], second[name][1]))
        if name.startswith("lanes/"):
            assert engaged > 0.9 * above > 10, (first[name][1], second[name][1])
        else:
            assert engaged == 0


@pytest.mark.slow
def test_tensor_parallel_ranks_draft_alike() -> None:
    """Both ranks draft, with all of the head, and must verify the same; drawn drafts of unseeded requests, too."""
    prompts = [[(29 * index + 7 * place) % 300 + 3 for place in range(4 + 5 * index)] for index in range(6)]
    greedy = SamplingParams(max_tokens=NEW, ignore_eos=True)
    params = [greedy if index % 2 == 0 else replace(greedy, temperature=0.9) for index in range(6)]
    options: dict[str, Any] = {"kv_cache_memory": "8M", "max_model_len": 128, "max_num_seqs": 6}
    options["skip_tokenizer_init"] = True
    with LLM(TINY_MOE, **options) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts[::2], greedy)]
    options |= {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    options |= {"enable_dbo": True, "dbo_decode_token_threshold": THRESHOLD}
    options |= {
        "speculative_algorithm": "eagle",
        "speculative_draft_model_path": HEAD,
        "speculative_accept": "rejection",
    }
    with LLM(TINY_MOE, **options) as llm:
        tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        statistics = llm.statistics[0]
    assert tokens[::2] == wanted
    assert [len(each) for each in tokens] == [NEW] * 6
    assert statistics.accepted_tokens > 20
    assert statistics.steps["target_verify/engaged"] > 5


@pytest.mark.slow
def test_whole_engines_with_the_trained_head(capsys: pytest.CaptureFixture[str]) -> None:
    """What `ubatch bench speculation` counts: it compares the tokens, too."""
    prompts = [[(13 * index + 7 * place) % 300 + 3 for place in range(12)] for index in range(16)]
    head = SpeculationConfig(Algorithm.EAGLE, 3, 3, draft_model_path=HEAD)
    census = take_census(TINY_MOE, head, prompts, NEW)
    assert census.engaged > 0.9 * census.above > 20, census
    assert census.engaged == census.steps["target_verify/engaged"]
    census.print()
    assert "ran in two lanes" in capsys.readouterr().out
