"""Several nodes: engines are started again on all of them, and a node that was lost may come back."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.context import SpawnProcess

import pytest
from engine_mains import engine_of_rank, tiny, tokens_of, two_nodes, wait_for

from model_runner import SamplingParams
from ranks import free_port
from serving.engine import EngineClient, EngineOptions, run_node
from serving.engine.launch import LocalEngines
from serving.engine.options import RestartLimits
from serving.engine.run import RunHost
from ubatch import UBatchConfig

pytestmark = pytest.mark.ranks

LONG = SamplingParams(max_tokens=300, ignore_eos=True)
TIMEOUT_S = 10.0


def of_node(node_rank: int, port: int) -> EngineOptions:
    return tiny(
        2,
        node_rank=node_rank,
        nnodes=2,
        master_port=port,
        restarts=RestartLimits(3),
        dbo=UBatchConfig(dbo_decode_token_threshold=4, timeout_s=TIMEOUT_S),
        log_level="info",
    )


async def disturbed(client: EngineClient, disturb: Callable[[], object]) -> tuple[list[list[int]], list[list[int]]]:
    """The outputs of two requests without, and with a failure in their midst."""
    prompts = [[1, 2], [3, 4, 5]]
    before = await asyncio.gather(*[tokens_of(client, f"before {each}", each, LONG) for each in prompts])
    tasks = [asyncio.create_task(tokens_of(client, f"after {each}", each, LONG)) for each in prompts]
    assert await wait_for(lambda: all(stream.tokens for stream in client._router._streams.values()))
    disturb()
    return before, await asyncio.gather(*tasks)


@pytest.mark.wide
@pytest.mark.parametrize("rank", [0, 1])
async def test_all_nodes_join_another_run(rank: int) -> None:
    async with two_nodes(restarts=RestartLimits(3), expert_parallel=True) as (client, node):
        pids = [client.pids[0], engine_of_rank(1)]
        before, after = await disturbed(client, lambda: os.kill(pids[rank] or 0, signal.SIGKILL))
        assert after == before
        assert client.resumed == 2
    assert await asyncio.wait_for(node, 30) == 0


def launched(options: EngineOptions) -> SpawnProcess:
    process = multiprocessing.get_context("spawn").Process(target=run_node, args=(options,))
    process.start()
    return process


@pytest.mark.slow
async def test_a_node_that_was_lost_comes_back_or_the_run_ends_by_name() -> None:
    port = free_port()
    first = launched(of_node(1, port))
    client = await EngineClient.start(of_node(0, port))
    again: list[SpawnProcess] = []

    def restart() -> None:
        first.kill()
        first.join()
        again.append(launched(of_node(1, port)))

    try:
        before, after = await disturbed(client, restart)
        assert after == before
        again[0].kill()
        begun = time.monotonic()
        lost = await asyncio.wait_for(client.wait_dead(), 60)
        assert str(lost).endswith("Engines were started again, but rank 1 is lost: node 1 has not joined within 10 s.")
        assert time.monotonic() - begun < 3 * TIMEOUT_S
    finally:
        await client.close()
        for each in (first, *again):
            each.kill()
            each.join()


@pytest.mark.wide
async def test_a_node_waits_until_the_run_that_failed_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store may still answer: on a GPU it does so as long as the ranks live, which take seconds to die."""
    kill = LocalEngines.kill

    def kill_late(engines: LocalEngines) -> None:
        if 0 in engines.ranks:
            time.sleep(1.5)
        kill(engines)

    monkeypatch.setattr(RunHost, "admit_no_more", lambda host: None)
    monkeypatch.setattr(LocalEngines, "kill", kill_late)

    async with two_nodes(restarts=RestartLimits(3)) as (client, node):
        before, after = await disturbed(client, lambda: os.kill(client.pids[0] or 0, signal.SIGKILL))
        assert after == before
    assert await asyncio.wait_for(node, 30) == 0
