"""Two nodes, both on this machine: a request is served by either, and node 0 hears of deaths that it cannot see."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal

import pytest
from engine_mains import is_alive, tiny, tokens_of, wait_for

from model_runner import SamplingParams
from ranks import free_port
from serving.engine import EngineClient, run_node
from serving.network import choose_interface
from serving.requests import EngineDead
from ubatch import ConfigError


def test_node_0_is_not_a_node_to_be_run() -> None:
    with pytest.raises(ConfigError, match="node 0 has the client"):
        run_node(tiny())


def test_the_interface_is_the_one_that_leads_to_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "chosen")
    choose_interface("127.0.0.1")
    assert os.environ.pop("GLOO_SOCKET_IFNAME") == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "chosen"


def test_two_nodes_serve_and_the_death_of_a_remote_rank_is_named() -> None:
    port = free_port()

    async def scenario() -> int:
        node = asyncio.create_task(
            asyncio.to_thread(run_node, tiny(2, nnodes=2, node_rank=1, master_port=port)),
        )
        client = await EngineClient.start(tiny(2, nnodes=2, master_port=port))
        try:
            assert list(client.pids) == [0]
            short = SamplingParams(max_tokens=4, ignore_eos=True)
            first, second = await asyncio.gather(*[tokens_of(client, name, [1, 2], short) for name in "ab"])
            assert first == second
            assert [each.generation_tokens for each in client.statistics.values()] == [4, 4]

            long = SamplingParams(max_tokens=500, ignore_eos=True)
            streams = [asyncio.create_task(tokens_of(client, name, [1, 2], long)) for name in "cd"]
            assert await wait_for(lambda: all(each.num_running for each in client.statistics.values()))
            remote = engine_of_rank(1)
            os.kill(remote, signal.SIGKILL)
            for outcome in await asyncio.gather(*streams, return_exceptions=True):
                assert isinstance(outcome, EngineDead)
                assert str(outcome) == "rank 1 was killed by SIGKILL."
            assert await wait_for(lambda: not is_alive(remote))
        finally:
            await client.close()
        return await node

    assert asyncio.run(scenario()) == 1


def engine_of_rank(rank: int) -> int:
    return next(p.pid for p in multiprocessing.active_children() if p.name == f"rank {rank}" and p.pid is not None)
