"""Two nodes, both on this machine: they serve or do a job, node 0 hears of deaths that it cannot see, engines are
started again on all of them, and a node that was lost may come back."""

import asyncio
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import SpawnProcess
from unittest.mock import Mock

import pytest
from engine_mains import engine_of_rank, is_alive, tiny, tokens_of, two_nodes, wait_for

from model_runner import SamplingParams
from ranks import free_port
from serving.engine import EngineClient, EngineOptions, run_node
from serving.engine.kept import InStep
from serving.engine.launch import LocalEngines
from serving.engine.node import _Supervisor, _Told
from serving.engine.options import RestartLimits
from serving.engine.rank.process import ToldToEnd, run_rank
from serving.engine.run import RunHost
from serving.engine.wire.link import EngineLink
from serving.engine.wire.messages import Failed, Finished, NodeFound, NodeHeard, RankFound, Ready, ToEngine
from serving.engine.wire.rendezvous import Place, Run, init_ranks
from serving.requests import EngineDead, RequestInput
from ubatch import CommGroup, ConfigError, UBatchConfig


def test_node_0_is_not_a_node_to_be_run() -> None:
    with pytest.raises(ConfigError, match="node 0 has the client"):
        run_node(tiny())


async def test_two_nodes_serve_and_the_death_of_a_remote_rank_is_named() -> None:
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
    assert await node == 1


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
async def test_ranks_of_two_nodes_do_a_job_and_a_node_says_whether_its_own_have_done_it(
    leave: str, status: int
) -> None:
    async with two_nodes(run_job, expert_parallel=True, job={"leave": leave}) as (client, node):
        assert await client.result() == "11.0"
    assert await node == status


FOUND = {1: RankFound(InStep(True, ("a",)), "S")}


@contextmanager
def leaving(status: int | None, *said: ToEngine) -> Iterator[tuple[Callable[[], int | None], Mock, int]]:
    """Of a node whose engines end, or do not, after node 0 has gone: what runs its supervisor; its engines and link;
    and a pipe that says that its rank has ended."""
    options = tiny(2, nnodes=2, node_rank=1, master_port=1, dbo=UBatchConfig(timeout_s=0.1))
    never_ready, other_end = os.pipe()
    both = Mock(ranks=range(1, 2), sentinels={1: never_ready})
    both.join.return_value, both.exit_status.return_value = status is not None, status
    both.ended.side_effect = lambda rank: Failed(rank, f"died with exit status {status}")
    both.found.return_value, both.receive.return_value, both.disconnected_s.return_value = FOUND, said, 2.0
    with _Told() as told:
        yield lambda: _Supervisor(options, both, both, told).run(), both, other_end
    os.close(never_ready)
    os.close(other_end)


@pytest.mark.parametrize(("rank", "node"), [(0, 0), (1, 1), (None, 1)])
def test_node_0_may_leave_before_ranks_that_it_told_to_end(rank: int | None, node: int) -> None:
    with leaving(rank) as (supervise, *_):
        assert supervise() == node


def test_a_run_that_failed_elsewhere_has_not_ended_well_here(caplog: pytest.LogCaptureFixture) -> None:
    """A node that was stopped, and then went on, found its ranks told to end, and returned 0 without a word."""
    with leaving(0, NodeHeard("rank 0 died.")) as (supervise, both, ended):
        assert supervise() == 1
        both.send.assert_any_call(NodeFound(1, FOUND))
        os.write(ended, b"!")
        assert supervise() == 1
    assert [each.startswith("run failed") for each in caplog.messages] == [True, False, True]


@pytest.mark.wide
async def test_the_death_of_a_rank_of_node_0_is_a_failure_of_every_node() -> None:
    async with two_nodes() as (client, node):
        os.kill(client.pids[0] or 0, signal.SIGKILL)
        assert str(await asyncio.wait_for(client.wait_dead(), 30)) == "rank 0 was killed by SIGKILL."
        assert await asyncio.wait_for(node, 30) == 1


# -- engines are started again -----------------------------------------------------------------------------------------


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
