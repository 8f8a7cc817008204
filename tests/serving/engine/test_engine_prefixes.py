"""A conversation with two ranks: its requests go to the one that has its pages."""

from __future__ import annotations

import pytest
from engine_mains import tiny, tokens_of
from engine_served import Served

from model_runner import SamplingParams

pytestmark = pytest.mark.long


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 1])
def test_a_conversation_finds_its_prompts_cached(ranks: int) -> None:
    with Served(tiny(ranks)) as served:
        params = SamplingParams(max_tokens=3, ignore_eos=True)

        async def talk() -> float:
            prompt = [place * 13 % 2000 + 1 for place in range(320)]
            for turn in range(24):
                prompt += await tokens_of(served.client, f"turn {turn}", prompt, params)
                prompt += [turn * 7 + place + 1 for place in range(4)]
            await served.client.settle()
            statistics = served.client.statistics.values()
            return sum(each.prefix_hits for each in statistics) / sum(each.prefix_queries for each in statistics)

        assert served.run(talk()) >= 0.92
