"""A limit on the prompt tokens of mixed steps, on ranks that step together: the same tokens, and the same steps."""

from typing import Any

import pytest
from repository import ROOT, TINY_MOE

from model_runner import SamplingParams
from serving import LLM

pytestmark = pytest.mark.ranks

TEXT = (ROOT / "serving" / "scheduler" / "radix_cache.py").read_text(encoding="utf-8")
PROMPTS = [TEXT[300 * number : 300 * number + 40 + 60 * (number % 9)] for number in range(20)]
PARAMS = [SamplingParams(max_tokens=6 + 5 * (number % 4), ignore_eos=True) for number in range(20)]


def generate(
    prompts: list[str] = PROMPTS, params: list[SamplingParams] = PARAMS, **options: Any
) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    with LLM(TINY_MOE, max_num_seqs=6, **options) as llm:
        tokens = [tuple(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]
        return tokens, dict(llm.statistics[0].steps)


@pytest.mark.slow
@pytest.mark.timeout(140)
def test_mixed_steps_above_the_threshold_overlap_and_smaller_ones_do_not() -> None:
    """Long prompts behind decodes on both ranks, so that nearly every mixed step is as large as the limit lets it."""
    prompts = [TEXT[:40], TEXT[40:80]] * 2 + [TEXT[200 * number :][:900] for number in range(12)]
    params = [SamplingParams(max_tokens=60 if number < 4 else 8, ignore_eos=True) for number in range(16)]
    dbo = {"data_parallel_size": 2, "enable_expert_parallel": True, "enable_dbo": True}
    whole = generate(prompts, params)[0]
    for limit, engaged in ((96, True), (32, False)):
        tokens, steps = generate(
            prompts, params, **dbo, dbo_prefill_token_threshold=64, max_prefill_tokens_per_mixed_step=limit
        )
        assert tokens == whole
        assert (steps.get("mixed/engaged", 0) > 0) == engaged, steps
        assert steps.get("mixed/below_prefill_threshold", 0) + steps.get("mixed/peer_declined", 0) > 0, steps


@pytest.mark.timeout(140)
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "fewest"), [("tensor_parallel_size", 10), ("data_parallel_size", 5)])
def test_auto_on_ranks_gives_the_same_tokens(ranks: str, fewest: int) -> None:
    """Each has a clock of its own; where tensor-parallel ones planned other steps, the engine would stop."""
    own: dict[str, Any] = {ranks: 2, "enable_expert_parallel": True, "max_prefill_tokens_per_mixed_step": "auto"}
    tokens, steps = generate(**own)
    assert tokens == generate()[0]
    assert sum(count for kind, count in steps.items() if kind.startswith("mixed/")) > fewest, steps
