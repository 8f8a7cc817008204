"""Engines whose experts move while they serve: in time, early, after a restart; and what a killed engine leaves."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest
from engine_mains import kill_engine, started, tiny, tokens_of, two_nodes, wait_for

from model_runner import SamplingParams
from moe import ExpertPlacement
from moe.balance import EplbConfig
from serving.balance.balancer import MoveReason
from serving.engine import EngineClient
from serving.engine.options import RestartLimits

pytestmark = pytest.mark.ranks

LONG = SamplingParams(max_tokens=120, ignore_eos=True)
CONFIG: dict[str, Any] = {
    "window_size": 20,
    "step_interval": 10**9,
    "balancedness_fall": 0.0,
    "move_bytes_per_step": 300_000,
}
PROMPTS = [[5, 6, 7], [5, 5, 5, 5, 5, 5], [9] * 20, [11, 12]]


def balanced(ranks: int = 2, **options: Any) -> AbstractAsyncContextManager[EngineClient]:
    config = EplbConfig(**{**CONFIG, **options.pop("config", {})})
    return started(tiny(ranks, expert_parallel=True, enable_eplb=True, eplb_config=config, **options))


async def all_tokens(client: EngineClient, prefix: str) -> list[list[int]]:
    named = enumerate(PROMPTS)
    return await asyncio.gather(*[tokens_of(client, f"{prefix}-{index}", prompt, LONG) for index, prompt in named])


def shuffled(placement: ExpertPlacement) -> ExpertPlacement:
    rng = np.random.default_rng(30)
    return ExpertPlacement(rng.permuted(placement.experts, axis=1), placement.num_experts, placement.num_ranks)


async def move_while_they_run(client: EngineClient) -> None:
    """Experts go to other slots while requests run: all get the tokens that they get before and after."""
    first = await all_tokens(client, "a")
    running = asyncio.create_task(all_tokens(client, "b"))
    wanted = shuffled(client.loads.placement)
    client.balancer.begin(wanted, range(4), MoveReason.INTERVAL)
    assert await running == first
    assert await wait_for(lambda: not client.balancer.moving)
    assert client.loads.placement == wanted
    assert not client.balancer.failed
    assert await all_tokens(client, "c") == first


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"step_interval": 40}, MoveReason.INTERVAL), ({"window_size": 60, "balancedness_fall": 0.01}, MoveReason.FALLEN)],
)
async def test_experts_move_and_no_token_changes(config: dict[str, Any], reason: MoveReason) -> None:
    async with balanced(config=config) as client:
        first = await all_tokens(client, "a")
        hottest = np.argsort(-client.loads.balance().tokens(), axis=1)  # all on rank 0
        skewed = ExpertPlacement(hottest, 8, 2)
        client.balancer.begin(skewed, range(4), MoveReason.RESTORED)
        assert await wait_for(lambda: not client.balancer.moving)
        assert (client.loads.placement.experts == hottest).all()
        for turn in range(6):
            assert await all_tokens(client, f"b{turn}") == first
            if client.balancer.layers_moved > 4 and not client.balancer.moving:
                break
        assert client.balancer.rearrangements[reason] >= 1
        assert not client.balancer.failed
        assert client.balancer.bytes_moved
        balance = client.loads.balance()  # of few tokens: how even they can be is chance
        assert balance.balancedness().mean() > skewed.balancedness(balance.tokens()).mean() + 0.1
        assert await all_tokens(client, "c") == first


@pytest.mark.wide
async def test_tensor_parallel_ranks_move_together() -> None:
    """The follower gets orders from its leader's turns."""
    async with balanced(1, tensor_parallel_size=2) as client:
        await move_while_they_run(client)


@pytest.mark.wide
async def test_ranks_of_two_nodes_move() -> None:
    async with two_nodes(expert_parallel=True, enable_eplb=True, eplb_config=EplbConfig(**CONFIG)) as (client, _):
        await move_while_they_run(client)


@pytest.mark.wide
async def test_a_placement_outlives_the_engines() -> None:
    """An engine is killed while experts rest, and again while they move."""

    async def kill(rank: int) -> None:
        await kill_engine(client, rank=rank)
        assert await wait_for(lambda: client.pause is None)

    async with balanced(restarts=RestartLimits(3)) as client:
        balancer, loads = client.balancer, client.loads
        first = await all_tokens(client, "a")
        wanted = shuffled(loads.placement)
        balancer.begin(wanted, range(4), MoveReason.INTERVAL)
        assert await wait_for(lambda: not balancer.moving)  # ranks that pause are woken
        assert loads.placement == wanted
        assert balancer.layers_moved == 4
        running = asyncio.create_task(all_tokens(client, "b"))
        await asyncio.sleep(0.2)
        await kill(1)
        assert await running == first
        assert await wait_for(lambda: loads.placement == wanted and not balancer.moving)
        assert balancer.rearrangements == {MoveReason.INTERVAL: 1, MoveReason.RESTORED: 1}

        other = shuffled(shuffled(wanted))
        running = asyncio.create_task(all_tokens(client, "c"))
        await asyncio.sleep(0.1)
        balancer.begin(other, range(4), MoveReason.INTERVAL)
        assert await wait_for(lambda: loads.placement != wanted)
        reached = loads.placement
        await kill(0)
        assert await running == first
        if not balancer.failed:  # it had ended
            reached = other
        assert await wait_for(lambda: not balancer.moving)
        assert balancer.rearrangements[MoveReason.RESTORED] == 2
        same = (loads.placement.experts == reached.experts).all(axis=1)
        assert all(same | (loads.placement.experts == other.experts).all(axis=1))
        assert await all_tokens(client, "d") == first
