"""Engines that are killed are started again, and every request goes on; one that kills them each time that it runs,
among others, ends alone."""

import asyncio
import errno
import itertools
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import engine_mains as mains
import pytest
import zmq
from engine_mains import PARAMS, PROMPTS, is_alive, kill_engine, started, tiny, tokens_of, two_nodes, wait_for
from forked import own_server

from model_runner import SamplingParams
from serving import fork_server, processes
from serving.engine import EngineClient, EngineOptions
from serving.engine.launch import EngineMain, LocalEngines
from serving.engine.options import RestartLimits
from serving.engine.rank.process import run_engine
from serving.engine.run import RunHost
from serving.engine.wire.rendezvous import Place
from serving.requests import EngineDead, EngineRestarting, PoisonousRequest, RequestInput
from ubatch import UBatchConfig, UBatchError

pytestmark = pytest.mark.ranks

LONGER = [replace(params, max_tokens=60 + 4 * number) for number, params in enumerate(PARAMS)]
UNSEEDED = SamplingParams(max_tokens=50, ignore_eos=True, temperature=1.0)
WAYS: Mapping[str, dict[str, Any]] = {
    "one rank": {},
    "data parallel": {"ranks": 2, "expert_parallel": True},
    "tensor parallel": {"tensor_parallel_size": 2},
}


def restarting(most: int = 3, **options: Any) -> EngineOptions:
    return tiny(**{"restarts": RestartLimits(most), **options})


async def all_outputs(client: EngineClient, prefix: str, most: int = len(PROMPTS)) -> list[list[int]]:
    named = enumerate(zip(PROMPTS[:most], LONGER[:most], strict=True))
    return await asyncio.gather(*[tokens_of(client, f"{prefix}-{index}", *each) for index, each in named])


async def one_after_the_other(client: EngineClient) -> None:
    """Requests for as long as there are engines."""
    for number in itertools.count():
        await tokens_of(client, f"request {number}", PROMPTS[0], LONGER[0])


@pytest.mark.parametrize("way", WAYS)
async def test_no_token_changes(way: str) -> None:
    """A stream that was interrupted is that of an engine without failures; and totals go on."""
    async with started(restarting(**WAYS[way])) as client:
        undisturbed = await all_outputs(client, "before")
        before = dict(client.statistics)
        running = asyncio.gather(all_outputs(client, "after"), tokens_of(client, "unseeded", [1, 2, 3], UNSEEDED))
        assert await wait_for(lambda: sum(each.num_running for each in client.statistics.values()) >= len(PROMPTS))
        earlier = dict(client.pids)
        await kill_engine(client, rank=len(client.pids) - 1)
        again, unseeded = await running
        assert again == undisturbed
        assert len(unseeded) == UNSEEDED.max_tokens
        assert client.pause is None
        assert client.resumed >= len(PROMPTS)
        assert not set(earlier.values()) & set(client.pids.values())
        assert not any(is_alive(pid) for pid in earlier.values() if pid is not None)
        await client.settle()
        for rank, known in before.items():
            assert client.statistics[rank].generation_tokens > known.generation_tokens
            assert client.statistics[rank].kv_usage == 0


async def test_new_requests_wait_for_engines_and_those_that_wait_too_long_are_told() -> None:
    async with started(restarting(restarts=RestartLimits(3, resume_timeout_s=30))) as client:
        await kill_engine(client)
        short = SamplingParams(max_tokens=3)
        impatient = client.generate(RequestInput("impatient", PROMPTS[0], short))
        client.options = replace(client.options, restarts=RestartLimits(3, resume_timeout_s=0.01))
        with pytest.raises(EngineRestarting, match=r"could not begin within 0\.01 s") as error:
            await anext(impatient)
        assert error.value.retry_after_s >= 1
        client.options = replace(client.options, restarts=RestartLimits(3, resume_timeout_s=30))
        left = asyncio.create_task(tokens_of(client, "left", PROMPTS[0], short))
        waiting = asyncio.create_task(tokens_of(client, "waiting", PROMPTS[0], short))
        await asyncio.sleep(0)
        assert client.num_outstanding == 2
        left.cancel()
        assert len(await waiting) == 3
        assert client.num_outstanding == 0
        assert client.resumed == 0


@pytest.mark.wide
async def test_one_failure_too_many_ends_the_run_as_without_restarts() -> None:
    async with started(restarting(1, ranks=2)) as client:
        running = asyncio.create_task(one_after_the_other(client))
        await kill_engine(client)
        assert await wait_for(lambda: client.pause is None)
        pids = [pid for pid in client.pids.values() if pid is not None]
        await kill_engine(client, rank=1)
        with pytest.raises(EngineDead, match=r"^rank 1 was killed by SIGKILL\.$"):
            await running
        assert client.dead is await client.wait_dead()
        assert client.pause is None
        assert await wait_for(lambda: not any(map(is_alive, pids)))


async def test_engines_may_be_closed_while_they_are_started_again() -> None:
    async with started(restarting(ranks=2)) as client:
        running = asyncio.create_task(one_after_the_other(client))
        await kill_engine(client)
        assert await wait_for(lambda: bool(client.pids) and None not in client.pids.values())
        await client.close()
        with pytest.raises(EngineDead, match="closed"):
            await running
        assert not any(is_alive(pid) for pid in client.pids.values() if pid is not None)


@pytest.mark.wide
async def test_a_stopped_engine_is_replaced() -> None:
    async with started(restarting(20, dbo=UBatchConfig(dbo_decode_token_threshold=4, timeout_s=2))) as client:
        undisturbed = await all_outputs(client, "before")
        running = asyncio.create_task(all_outputs(client, "after"))
        await asyncio.sleep(0.05)
        begun = time.monotonic()
        await kill_engine(client, signal.SIGSTOP)
        assert time.monotonic() - begun < 8
        assert await running == undisturbed


def fails_when_it_starts_again(options: EngineOptions, rank: int, place: Place) -> None:
    """An engine whose second process fails while it starts."""
    started = options.profile_folder / "started"
    started.write_text(f"{started.read_text() if started.exists() else ''}!")
    if started.read_text() == "!!":
        mains.exit_at_once(options, rank, place)
    run_engine(options, rank, place)


@pytest.mark.wide
async def test_a_failure_during_the_restart_counts_as_one_more(tmp_path: Path) -> None:
    async with started(restarting(2, profile_folder=tmp_path), fails_when_it_starts_again) as client:
        await kill_engine(client)
        assert len(await tokens_of(client, "a", PROMPTS[0], LONGER[0])) == LONGER[0].max_tokens
        assert sum(client.restarts.values()) == 2


SLOW = pytest.mark.slow


@asynccontextmanager
async def engines(main: EngineMain, *, nodes: int = 1, **options: Any) -> AsyncIterator[EngineClient]:
    if nodes > 1:
        async with two_nodes(main, **options) as (client, _):
            yield client
        return
    async with started(tiny(**options), main) as client:
        yield client


@pytest.mark.parametrize(
    ("main", "options"),
    [
        pytest.param(mains.run_poisonable_engine, WAYS["data parallel"], id="data parallel", marks=pytest.mark.wide),
        pytest.param(mains.run_engine_with_poisonable_schedule, WAYS["data parallel"], id="schedule", marks=SLOW),
        pytest.param(mains.run_poisonable_engine, WAYS["tensor parallel"], id="tensor parallel", marks=SLOW),
        pytest.param(mains.run_poisonable_engine, {"nodes": 2, "expert_parallel": True}, id="two nodes", marks=SLOW),
        pytest.param(mains.run_poisonable_engine, {}, id="one rank"),
        pytest.param(mains.run_poisonable_engine, {"overlap_schedule": True}, id="overlapped loop", marks=SLOW),
    ],
)
async def test_only_the_poisonous_request_ends(main: EngineMain, options: dict[str, Any]) -> None:
    """Each step that it is in raises, or the scheduler, as long as it has it; the others give what they give without
    it. There are more failures than may be, apart from those of a search."""
    async with engines(main, restarts=RestartLimits(2), **options) as client:
        undisturbed = await all_outputs(client, "before", 3)
        others = asyncio.create_task(all_outputs(client, "after", 3))
        assert await wait_for(lambda: sum(each.num_running for each in client.statistics.values()) == 3)
        with pytest.raises(PoisonousRequest, match=r"'poison' has killed the engine .* ZeroDivisionError: poisoned"):
            await tokens_of(client, "poison", [2, mains.POISON], LONGER[0])
        assert await others == undisturbed
        assert client.poisonous == 1
        assert client.pause is None
        assert 2 < sum(client.restarts.values()) == client.restarts["failed"] <= 7
        assert await all_outputs(client, "again", 3) == undisturbed


@pytest.mark.wide
async def test_engines_start_again_though_what_forks_them_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not tell that they have ended: another one begins."""
    monkeypatch.setattr(processes, "_TOLD_S", 0.5)
    with own_server() as server:
        async with started(restarting(20, dbo=UBatchConfig(dbo_decode_token_threshold=4, timeout_s=2))) as client:
            undisturbed = await all_outputs(client, "before")
            running = asyncio.create_task(all_outputs(client, "after"))
            assert await wait_for(lambda: client.statistics[0].num_running == len(PROMPTS))
            os.kill(server._process.pid, signal.SIGSTOP)
            await kill_engine(client)
            assert await running == undisturbed
            assert await wait_for(lambda: client.pause is None)
            assert fork_server._current is not server


KILL = LocalEngines.kill
STUCK = "rank 0 (process 7, in state D) was killed and does not end."


def kill_in_vain(engines: LocalEngines) -> None:
    """The process waits for a driver: for ever."""
    KILL(engines)
    raise UBatchError(STUCK)


@pytest.mark.parametrize(
    ("owner", "method", "instead", "why"),
    [
        (RunHost, "__init__", Mock(side_effect=zmq.ZMQError(errno.EMFILE)), "Too many open files"),
        (LocalEngines, "kill", kill_in_vain, STUCK),
    ],
    ids=["no descriptors", "a process that does not end"],
)
async def test_whatever_keeps_engines_from_starting_again_ends_the_run(
    owner: type, method: str, instead: Callable[..., None], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only this project's errors: nobody would tell the clients, which would wait for ever."""
    async with started(restarting()) as client:
        running = asyncio.create_task(one_after_the_other(client))
        monkeypatch.setattr(owner, method, instead)
        await kill_engine(client)
        with pytest.raises(EngineDead, match=re.escape(f"engines cannot be started again: {why}")):
            await running
        assert str(await client.wait_dead()).startswith("engines cannot be started again")
        assert client.pause is None
