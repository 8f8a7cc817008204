"""A request that kills the engine each time that it runs, among others: it alone ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from engine_mains import POISON, run_poisonable_engine, started, tiny, tokens_of, two_nodes, wait_for

from model_runner import SamplingParams
from serving.engine import EngineClient
from serving.engine.options import RestartLimits
from serving.requests import PoisonousRequest

pytestmark = pytest.mark.ranks

PARAMS = SamplingParams(max_tokens=50, ignore_eos=True)


@asynccontextmanager
async def engines(*, nodes: int = 1, **options: Any) -> AsyncIterator[EngineClient]:
    if nodes > 1:
        async with two_nodes(run_poisonable_engine, **options) as (client, _):
            yield client
        return
    async with started(tiny(**options), run_poisonable_engine) as client:
        yield client


async def all_of(client: EngineClient, names: Sequence[str]) -> list[list[int]]:
    return await asyncio.gather(*[tokens_of(client, name, [1, index], PARAMS) for index, name in enumerate(names)])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"ranks": 2, "expert_parallel": True}, id="data parallel", marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2}, id="tensor parallel", marks=pytest.mark.slow),
        pytest.param({"nodes": 2, "expert_parallel": True}, id="two nodes", marks=pytest.mark.slow),
        pytest.param({}, id="one rank"),
        pytest.param({"overlap_schedule": True}, id="overlapped loop", marks=pytest.mark.slow),
    ],
)
async def test_only_the_poisonous_request_ends(options: dict[str, Any]) -> None:
    """More failures than may be, apart from those of a search."""
    names = [f"other-{number}" for number in range(3)]
    async with engines(restarts=RestartLimits(2), **options) as client:
        undisturbed = await all_of(client, names)
        others = asyncio.create_task(all_of(client, names))
        assert await wait_for(lambda: sum(each.num_running for each in client.statistics.values()) == len(names))
        with pytest.raises(PoisonousRequest, match=r"'poison' has killed the engine .* poisoned"):
            await tokens_of(client, "poison", [2, POISON], PARAMS)
        assert await others == undisturbed
        assert client.poisonous == 1
        assert sum(client.restarts.values()) == client.restarts["failed"] > 2
        assert client.pause is None
