"""Engines that fail in a step, at the start, lose their parent, or hang: who is blamed, and that nothing is left
behind; what waits for one that hangs fails in time, and a pause that ends in time is forgiven."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import engine_mains as mains
import pytest
from engine_mains import is_alive, started, tiny, tokens_of, wait_for, wait_until
from repository import ROOT, SUPPORT, TINY_MOE

from model_runner import CheckpointError, ModelRunner, SamplingParams, generate
from serving.engine import EngineClient, EngineOptions, liveness
from serving.engine.launch import EngineMain
from serving.engine.rank import process
from serving.engine.rank.process import run_engine
from serving.engine.wire.rendezvous import Place
from serving.requests import EngineDead
from ubatch import ConfigError, UBatchConfig
from ubatch.process.heartbeat import Heart, beat, stop_hearts
from ubatch.ranks.long_calls import holding_gil, taking_long

LONG = SamplingParams(max_tokens=400, ignore_eos=True)

PARENT = """
import asyncio, multiprocessing, sys
from engine_mains import tiny
from serving.engine import EngineClient

async def serving():
    client = await EngineClient.start(tiny())
    print(client.pids[0], flush=True)
    await asyncio.sleep(60)

async def starting():
    start = asyncio.create_task(EngineClient.start(tiny()))
    while not multiprocessing.active_children():
        await asyncio.sleep(0.01)
    print(multiprocessing.active_children()[0].pid, flush=True)
    await start

if __name__ == "__main__":
    asyncio.run({"serving": serving, "starting": starting}[sys.argv[1]]())
"""


async def test_the_rank_that_raised_is_blamed_with_its_own_error() -> None:
    """The other one felt it, too, and says so; it shares every step."""
    async with started(tiny(2, expert_parallel=True), mains.run_poisonable_engine) as client:
        pids = [pid for pid in client.pids.values() if pid is not None]
        names = ["even", "odd"]  # one for each rank
        streams = [asyncio.create_task(tokens_of(client, name, [1, 2, 3], LONG)) for name in names]
        assert await wait_for(lambda: all(s.generation_tokens > 0 for s in client.statistics.values()))
        poison = asyncio.create_task(tokens_of(client, "poison", [mains.POISON] * 300, LONG))
        outcomes = await asyncio.gather(poison, *streams, return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, EngineDead), outcome
            assert str(outcome) in {f"rank {rank} failed: ZeroDivisionError: poisoned" for rank in (0, 1)}
            assert "in poisoned" in "".join(outcome.__notes__)
        assert await wait_for(lambda: not any(map(is_alive, pids)))


@pytest.mark.slow
async def test_ranks_that_start_at_different_speeds_wait_for_each_other() -> None:
    """Longer than `timeout_s`: in its first vote rank 0 waits until rank 1 has loaded, too."""
    dbo = UBatchConfig(dbo_decode_token_threshold=4, dbo_prefill_token_threshold=8, timeout_s=mains.LATE_S - 2)
    async with started(tiny(2, expert_parallel=True, dbo=dbo), mains.run_uneven_engine) as client:
        assert len(await tokens_of(client, "one", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))) == 4


@pytest.mark.parametrize(
    ("options", "main", "error", "message"),
    [
        (EngineOptions(Path("/nowhere")), run_engine, CheckpointError, "/nowhere is not a folder"),
        (tiny(), mains.exit_at_once, EngineDead, "rank 0 died with exit status 7"),
        (tiny(2, nnodes=2, master_addr="203.0.113.1", master_port=1), run_engine, ConfigError, "master_addr"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(
    options: EngineOptions, main: EngineMain, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await EngineClient.start(options, engine_main=main)


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize("when", ["serving", "starting"])
def test_an_engine_does_not_outlive_its_parent(when: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, when],
        stdout=subprocess.PIPE,
        text=True,
        cwd=SUPPORT,
        env={"PYTHONPATH": f"{ROOT}:{SUPPORT}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    with parent, parent.stdout as out:
        engine = int(out.readline())
        assert is_alive(engine)
        parent.kill()
        parent.wait(20)
        assert wait_until(lambda: not is_alive(engine))


# -- engines that hang -------------------------------------------------------------------------------------------------


TIMEOUT_S = 4.0
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


def impatient(options: EngineOptions, timeout_s: float = TIMEOUT_S) -> EngineOptions:
    return replace(options, dbo=UBatchConfig(dbo_decode_token_threshold=4, timeout_s=timeout_s))


def stop(client: EngineClient, rank: int) -> int:
    pid = client.pids[rank]
    os.kill(pid, signal.SIGSTOP)
    return pid


@pytest.mark.wide
async def test_an_idle_engine_that_hangs_is_named_and_one_that_goes_on_in_time_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client's clock goes on by hand, so that a busy machine makes nobody late."""
    async with started(impatient(tiny())) as client:
        signs, clock = client._runs.run.liveness, client._runs.run.liveness._clock
        monkeypatch.setattr(clock, "look", lambda: clock.now)
        pid = stop(client, 0)
        clock.now += 0.75 * TIMEOUT_S
        await asyncio.sleep(2 * clock.every_s)
        os.kill(pid, signal.SIGCONT)
        assert await wait_for(lambda: signs._heard[0] == clock.now)
        clock.now += 0.75 * TIMEOUT_S
        assert len(await tokens_of(client, "after", [1, 2], SHORT)) == 4
        assert client.dead is None

        stop(client, 0)
        hung = asyncio.create_task(tokens_of(client, "hung", [1, 2], SHORT))
        while not hung.done():
            clock.now += TIMEOUT_S / 8
            await asyncio.sleep(0.05)
        with pytest.raises(EngineDead, match=r"^rank 0 hangs: .* no sign of life for 4 s"):
            await hung
        assert (await asyncio.wait_for(client.wait_dead(), 10)) is client.dead
        assert await wait_for(lambda: not is_alive(pid))


START_S = 5.0


def stop_while_loading(options: EngineOptions, rank: int, place: Place) -> None:
    """`run_engine`, in which rank 1 is stopped while it loads its model."""

    def stop_here(*args: object, **kwargs: object) -> ModelRunner:
        os.kill(os.getpid(), signal.SIGSTOP)
        raise AssertionError("went on")

    if rank == 1:
        process.make_runner = stop_here
    run_engine(options, rank, place)


def join_late(options: EngineOptions, rank: int, place: Place) -> None:
    """`run_engine`, in which rank 1 never joins."""
    (mains.sleep_for_ever if rank == 1 else run_engine)(options, rank, place)


@pytest.mark.wide
@pytest.mark.sample(2)  # each waits for the five seconds
@pytest.mark.parametrize(
    ("main", "who", "options"),
    [
        (mains.sleep_for_ever, "[01]", tiny(2, expert_parallel=True)),
        (stop_while_loading, "1", tiny(2, expert_parallel=True)),
        (join_late, "1", tiny(2, expert_parallel=True)),
        (join_late, "1", tiny(tensor_parallel_size=2)),
    ],
)
async def test_an_engine_that_is_stopped_while_it_starts_is_named(
    main: EngineMain, who: str, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_LEAST_START_S", START_S)
    options = impatient(options, 1.0)
    with pytest.raises(EngineDead, match=rf"^rank {who}( \(.*\))? hangs while it starts: .* no sign of life for 5 s"):
        await asyncio.wait_for(EngineClient.start(options, engine_main=main), 60)


@pytest.mark.slow
async def test_of_ranks_that_step_together_the_one_that_hangs_is_named() -> None:
    """The other one waits for it, and says so all the time."""
    async with started(impatient(tiny(2, expert_parallel=True))) as client:
        streams = [asyncio.create_task(tokens_of(client, name, [1, 2, 3], LONG)) for name in "ab"]
        assert await wait_for(lambda: all(each.generation_tokens for each in client.statistics.values()))
        stop(client, 1)
        for outcome in await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 30):
            assert isinstance(outcome, EngineDead)
            assert str(outcome).startswith("rank 1 hangs: ")


# -- without processes ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_heart_beats_where_a_wait_goes_on_and_announces_long_calls() -> None:
    sent: list[float] = []
    heart = Heart(sent.append, every_s=0.5)
    beat()
    beat()  # too soon
    assert sent == [0.0]
    with holding_gil("a call", 10.0):
        assert sent == [0.0, 15.0]
        with taking_long("another"):
            assert sent == [0.0, 15.0, 900.0]
        time.sleep(0.55)
        heart.beat()
        assert sent[-1] == 900.0
    time.sleep(1.1)
    heart.beat()
    assert sent[-1] == 0.0
    stop_hearts()
    time.sleep(0.55)
    beat()
    assert sent[-2:] == [900.0, 0.0]


def test_a_step_without_lanes_beats_between_its_layers() -> None:
    sent: list[float] = []
    heart = Heart(sent.append, every_s=0.0)
    with ModelRunner(TINY_MOE, kv_cache_memory=8 << 20) as runner:
        before = len(sent)
        generate(runner, [[1, 2, 3]], SamplingParams(max_tokens=1))
        assert len(sent) - before >= runner.config.num_layers > 1
    heart.stop()
