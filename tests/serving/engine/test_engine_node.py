"""Two nodes, both on this machine: they serve or do a job, and node 0 hears of deaths that it cannot see."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from contextlib import closing
from functools import partial
from typing import Any

import pytest
from engine_mains import engine_of_rank, is_alive, tiny, tokens_of, two_nodes, wait_for

from model_runner import SamplingParams
from serving.engine import EngineOptions, run_node
from serving.engine.node import _Supervisor, _Told
from serving.engine.rank.process import ToldToEnd, run_rank
from serving.engine.wire.link import EngineLink
from serving.engine.wire.messages import Failed, Finished, NodeAlive, NodeHeard, RankFound, Ready, ToEngine
from serving.engine.wire.rendezvous import Place, Run, init_ranks
from serving.requests import EngineDead, RequestInput
from ubatch import CommGroup, ConfigError, UBatchConfig


def test_node_0_is_not_a_node_to_be_run() -> None:
    with pytest.raises(ConfigError, match="node 0 has the client"):
        run_node(tiny())


def test_two_nodes_serve_and_the_death_of_a_remote_rank_is_named() -> None:
    async def scenario() -> int:
        async with two_nodes() as (client, node):
            assert list(client.pids) == [0]
            short = SamplingParams(max_tokens=4, ignore_eos=True)
            first, second = await asyncio.gather(*[tokens_of(client, name, [1, 2], short) for name in "ab"])
            assert first == second
            assert [each.generation_tokens for each in client.statistics.values()] == [4, 4]

            long = SamplingParams(max_tokens=500, ignore_eos=True)
            remote = engine_of_rank(1)
            begun: set[str] = set()

            async def stream(name: str) -> None:
                """One request after the other, so that the end of a fast one does not come before the death."""
                for number in itertools.count():
                    async for _ in client.generate(RequestInput(f"{name}{number}", [1, 2], long)):
                        begun.add(name)

            streams = [asyncio.create_task(stream(name)) for name in "cd"]  # one on each rank
            assert await wait_for(lambda: len(begun) == 2)
            os.kill(remote, signal.SIGKILL)
            for outcome in await asyncio.gather(*streams, return_exceptions=True):
                assert isinstance(outcome, EngineDead)
                assert str(outcome) == "rank 1 was killed by SIGKILL."
            assert await wait_for(lambda: not is_alive(remote))
        return await node

    assert asyncio.run(scenario()) == 1


def add_up(options: EngineOptions, rank: int, run: Run, link: EngineLink) -> None:
    init_ranks(run, rank, options)
    group = CommGroup.from_process_group()
    link.send(Ready(rank, 1, 1, ""))
    highest = -group.least(-10.0 - rank)
    if rank == 0:
        link.send(Finished(rank, str(highest)))
    while not link.shutdown_comes():
        pass
    if options.job["leave"] == "in time":
        link.close()
        return
    raise ToldToEnd("too early")


def run_job(options: EngineOptions, rank: int, place: Place) -> None:
    run_rank(options, rank, place, partial(add_up, options, rank))


@pytest.mark.parametrize(("leave", "status"), [("in time", 0), ("early", 1)])
def test_the_ranks_of_two_nodes_do_a_job_and_a_node_says_whether_its_own_have_done_it(leave: str, status: int) -> None:
    async def scenario() -> int:
        async with two_nodes(run_job, expert_parallel=True, job={"leave": leave}) as (client, node):
            assert await client.result() == "11.0"
        return await node

    assert asyncio.run(scenario()) == status


class Leaving:
    """Engines of a node that end, or do not, after node 0 has gone."""

    ranks = range(1, 2)

    def __init__(self, status: int | None, *said: ToEngine) -> None:
        self.said = said
        self.status, (self.never_ready, self._other_end) = status, os.pipe()
        self.sentinels = {1: self.never_ready}

    def join(self, timeout_s: float) -> bool:
        return self.status is not None

    def exit_status(self, rank: int) -> int | None:
        return self.status

    def ended(self, rank: int) -> Failed:
        return Failed(rank, f"died with exit status {self.status}")

    def found(self) -> dict[int, RankFound]:
        return {}

    def receive(self, wait_s: float) -> tuple[ToEngine, ...]:
        return self.said

    def disconnected_s(self) -> float:
        return 2.0

    def send(self, message: NodeAlive) -> None:
        pass

    def close(self) -> None:
        os.close(self.never_ready)
        os.close(self._other_end)


@pytest.mark.parametrize(("rank", "node"), [(0, 0), (1, 1), (None, 1)])
def test_node_0_may_leave_before_ranks_that_it_told_to_end(rank: int | None, node: int) -> None:
    with _Told() as told, closing(Leaving(rank)) as all_of_it:
        fakes: Any = (all_of_it,) * 2
        options = tiny(2, nnodes=2, node_rank=1, master_port=1, dbo=UBatchConfig(timeout_s=0.1))
        assert _Supervisor(options, *fakes, told).run() == node


def test_a_run_that_failed_elsewhere_has_not_ended_well_here(caplog: pytest.LogCaptureFixture) -> None:
    """A node that was stopped, and then went on, found its ranks told to end, and returned 0 without a word."""
    options = tiny(2, nnodes=2, node_rank=1, master_port=1, dbo=UBatchConfig(timeout_s=0.1))
    with _Told() as told, closing(Leaving(0, NodeHeard("rank 0 died."))) as all_of_it:
        fakes: Any = (all_of_it,) * 2
        assert _Supervisor(options, *fakes, told).run() == 1
        os.write(all_of_it._other_end, b"!")  # its rank has ended
        assert _Supervisor(options, *fakes, told).run() == 1
    assert [each.startswith("run failed") for each in caplog.messages] == [True, False, True]


def test_the_death_of_a_rank_of_node_0_is_a_failure_of_every_node() -> None:
    async def scenario() -> int:
        async with two_nodes() as (client, node):
            os.kill(client.pids[0] or 0, signal.SIGKILL)
            assert str(await asyncio.wait_for(client.wait_dead(), 30)) == "rank 0 was killed by SIGKILL."
            return await asyncio.wait_for(node, 30)

    assert asyncio.run(scenario()) == 1
