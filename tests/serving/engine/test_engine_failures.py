"""Engines that fail in a step, at the start, or lose their parent: who is blamed, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from engine_mains import (
    LATE_S,
    POISON,
    exit_at_once,
    is_alive,
    run_poisonable_engine,
    run_uneven_engine,
    started,
    tiny,
    tokens_of,
    wait_for,
    wait_until,
)
from repository import ROOT, SUPPORT

from model_runner import CheckpointError, SamplingParams
from serving.engine import EngineClient, EngineOptions
from serving.engine.launch import EngineMain
from serving.engine.rank.process import run_engine
from serving.requests import EngineDead
from ubatch import ConfigError, UBatchConfig

pytestmark = pytest.mark.ranks

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
    async with started(tiny(2, expert_parallel=True), run_poisonable_engine) as client:
        pids = [pid for pid in client.pids.values() if pid is not None]
        names = ["even", "odd"]  # one for each rank
        streams = [asyncio.create_task(tokens_of(client, name, [1, 2, 3], LONG)) for name in names]
        assert await wait_for(lambda: all(s.generation_tokens > 0 for s in client.statistics.values()))
        poison = asyncio.create_task(tokens_of(client, "poison", [POISON] * 300, LONG))
        outcomes = await asyncio.gather(poison, *streams, return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, EngineDead), outcome
            assert str(outcome) in {f"rank {rank} failed: ZeroDivisionError: poisoned" for rank in (0, 1)}
            assert "in poisoned" in "".join(outcome.__notes__)
        assert await wait_for(lambda: not any(map(is_alive, pids)))


@pytest.mark.slow
async def test_ranks_that_start_at_different_speeds_wait_for_each_other() -> None:
    """Longer than `timeout_s`: in its first vote rank 0 waits until rank 1 has loaded, too."""
    dbo = UBatchConfig(dbo_decode_token_threshold=4, dbo_prefill_token_threshold=8, timeout_s=LATE_S - 2)
    async with started(tiny(2, expert_parallel=True, dbo=dbo), run_uneven_engine) as client:
        assert len(await tokens_of(client, "one", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))) == 4


@pytest.mark.parametrize(
    ("options", "main", "error", "message"),
    [
        (EngineOptions(Path("/nowhere")), run_engine, CheckpointError, "/nowhere is not a folder"),
        (tiny(), exit_at_once, EngineDead, "rank 0 died with exit status 7"),
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
