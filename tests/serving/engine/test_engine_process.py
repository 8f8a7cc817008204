"""Two ranks that share experts, behind a client: streams, pauses, aborts, profiles, and the death of one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from engine_mains import is_alive, run_drowsy_engine, tiny, tokens_of, wait_for
from engine_served import LONG, PROMPTS, Served, cpu_seconds, outputs_of_one_rank

from attention import KVCacheExhausted
from model_runner import FinishReason, RequestError, SamplingParams
from serving.requests import EngineDead, RequestInput, RequestOutput

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served(tiny(2, expert_parallel=True))
    yield served
    served.close()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return outputs_of_one_rank()


def test_the_streams_are_those_of_one_rank_alone(served: Served, expected: list[list[int]]) -> None:
    assert served.run(served.all_outputs("first")) == expected
    info, statistics = served.client.info, served.client.statistics
    assert (info.vocab_size, info.max_model_len) == (2048, 512)
    assert "rank 0: KV cache" in info.memory
    assert served.run(served.drained())
    assert sum(each.generation_tokens for each in statistics.values()) == sum(map(len, expected))
    for rank in (0, 1):
        assert statistics[rank].generation_tokens > 0
        assert any(key.endswith("/engaged") for key in statistics[rank].steps), statistics[rank].steps


def test_requests_that_come_together_start_in_the_same_step() -> None:
    """Also if they come before a slow rank has had its first look at what there is."""
    served = Served(tiny(2, expert_parallel=True), run_drowsy_engine)
    try:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        tokens = [tokens_of(served.client, str(index), PROMPTS[index], params) for index in range(4)]

        async def at_once() -> None:
            await asyncio.gather(*tokens)
            await served.client.settle()

        served.run(at_once())
        for statistics in served.client.statistics.values():
            assert sum(statistics.steps.values()) == 5, statistics.steps
    finally:
        served.close()


def test_ranks_that_pause_use_no_cpu_and_wake_again(served: Served, expected: list[list[int]]) -> None:
    assert served.run(served.drained())
    pids = [pid for pid in served.client.pids.values() if pid is not None]
    for _ in range(10):  # a rank may have gone along with the other for some steps after its own last output
        statistics, cpu = dict(served.client.statistics), sum(map(cpu_seconds, pids))
        served.run(asyncio.sleep(1.5))
        if served.client.statistics == statistics:
            break
    assert served.client.statistics == statistics
    assert sum(map(cpu_seconds, pids)) - cpu < 0.3
    assert served.run(served.all_outputs("again")) == expected


def test_no_request_is_lost_around_a_pause(served: Served, expected: list[list[int]]) -> None:
    """Requests that come just as the ranks go to sleep, at either of them."""

    async def scenario() -> None:
        for turn in range(25):
            await asyncio.sleep(random.random() * 0.02)
            tokens = await asyncio.wait_for(
                tokens_of(served.client, f"turn-{turn}", PROMPTS[0], SamplingParams(max_tokens=2, ignore_eos=True)), 30
            )
            assert tokens == expected[0][:2]

    served.run(scenario())


def test_closing_a_stream_frees_what_it_held(served: Served) -> None:
    async def scenario() -> None:
        async with aclosing(served.client.generate(RequestInput("left", PROMPTS[1], LONG))) as stream:
            assert (await anext(stream)).token_ids
        task = asyncio.create_task(tokens_of(served.client, "cancelled", PROMPTS[2], LONG))
        await wait_for(lambda: served.client.num_outstanding == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert served.client.num_outstanding == served.client.num_waiting == 0

    served.run(scenario())
    assert served.run(served.drained())


def test_abort_ends_a_stream(served: Served) -> None:
    async def scenario() -> RequestOutput | None:
        last = None
        async for output in served.client.generate(RequestInput("aborted", PROMPTS[1], LONG)):
            last = output
            await served.client.abort("aborted")
        await served.client.abort("aborted")
        return last

    last = served.run(scenario())
    assert last is not None
    assert last.finish_reason is FinishReason.ABORT
    assert served.run(served.drained())


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ([], LONG, RequestError),
        ([5000], LONG, RequestError),
        ([1] * 600, LONG, RequestError),
        ([2**70], LONG, RequestError),
        ([1.5], LONG, RequestError),
        ([1], None, RequestError),
        ([object()], LONG, RequestError),
    ],
)
def test_what_cannot_be_served_is_refused_by_itself(
    served: Served, prompt: Any, params: Any, error: type[Exception]
) -> None:
    with pytest.raises(error) as raised:
        served.run(tokens_of(served.client, "wrong", prompt, params))
    assert type(raised.value) in (RequestError, KVCacheExhausted)
    assert served.client.dead is None
    assert len(served.run(tokens_of(served.client, "right", [1], SamplingParams(max_tokens=1)))) == 1


def test_an_id_that_is_in_use_is_refused(served: Served) -> None:
    async def scenario() -> None:
        async with aclosing(served.client.generate(RequestInput("same", [1], LONG))) as stream:
            await anext(stream)
            with pytest.raises(RequestError, match="'same'"):
                await tokens_of(served.client, "same", [1], LONG)

    served.run(scenario())


def test_a_profile_shows_both_lanes_of_every_rank(served: Served, tmp_path: Path) -> None:
    async def scenario() -> list[Path]:
        await served.client.start_profile()
        await served.all_outputs("profiled")
        return await served.client.stop_profile(tmp_path)

    paths = served.run(scenario())
    assert [path.parent for path in paths] == [tmp_path] * 2
    assert [path.name.partition("-rank-")[2] for path in paths] == ["0.json", "1.json"]
    for rank, path in enumerate(paths):
        events = json.loads(path.read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert {"lane 0", "lane 1", "link"} <= names


def test_the_death_of_a_rank_reaches_every_stream(served: Served) -> None:
    """The last test: nothing runs after it."""
    pids = dict(served.client.pids)

    async def scenario() -> list[Any]:
        streams = [asyncio.create_task(tokens_of(served.client, f"last-{i}", PROMPTS[i], LONG)) for i in range(4)]
        await wait_for(lambda: all(each.num_running > 0 for each in served.client.statistics.values()))
        assert pids[1] is not None
        os.kill(pids[1], signal.SIGKILL)
        begun = time.monotonic()
        outcomes = await asyncio.gather(*streams, return_exceptions=True)
        assert time.monotonic() - begun < 30
        assert await asyncio.wait_for(served.client.wait_dead(), 10) is served.client.dead
        return outcomes

    for outcome in served.run(scenario()):
        assert isinstance(outcome, EngineDead)
        assert str(outcome) == "rank 1 was killed by SIGKILL."
    with pytest.raises(EngineDead, match="rank 1"):
        served.run(tokens_of(served.client, "late", [1], LONG))
    with pytest.raises(EngineDead, match="rank 1"):
        served.run(served.client.start_profile())
    with pytest.raises(EngineDead, match="rank 1"):
        served.run(served.client.stop_profile())
    assert pids[0] is not None
    assert served.run(wait_for(lambda: not is_alive(pids[0] or 0)))
