"""Engines behind a client, for tests that look at what they give: prompts, and what one rank alone gives for them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from engine_mains import tiny, tokens_of, wait_for

from model_runner import SamplingParams
from serving.engine import EngineClient, EngineOptions
from serving.engine.launch import EngineMain
from serving.engine.offline import InProcessEngine
from serving.engine.rank.process import run_engine
from serving.requests import RequestInput, RequestOutput

T = TypeVar("T")

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
PROMPTS = [[(index * 13 + place) % 2000 + 1 for place in range(3 + 5 * index)] for index in range(8)]
PARAMS = [
    SamplingParams(max_tokens=6 + index, ignore_eos=True, temperature=0.8 if index % 2 else 0.0, seed=index)
    for index in range(8)
]


class Served:
    """A client, and the loop that it lives on."""

    def __init__(self, options: EngineOptions, engine_main: EngineMain = run_engine) -> None:
        self._runner = asyncio.Runner()
        try:
            self.client = self.run(EngineClient.start(options, engine_main=engine_main))
        except BaseException:
            self._runner.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def all_outputs(self, prefix: str) -> list[list[int]]:
        names = [f"{prefix}-{index}" for index in range(len(PROMPTS))]
        return await asyncio.gather(
            *[tokens_of(self.client, *each) for each in zip(names, PROMPTS, PARAMS, strict=True)]
        )

    async def drained(self) -> bool:
        """Whether nothing runs any more, and every block is free, as far as every rank says."""

        def nothing_runs() -> bool:
            statistics = self.client.statistics.values()
            return all(each.num_running == each.num_waiting == each.kv_usage == 0 for each in statistics)

        return await wait_for(nothing_runs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.client.close())
        self._runner.close()


def outputs_of_one_rank() -> list[list[int]]:
    """What one rank alone gives for each prompt."""
    outputs: dict[str, list[int]] = {}
    engine = InProcessEngine(tiny())

    def take(output: RequestOutput) -> bool:
        outputs.setdefault(output.request_id, []).extend(output.token_ids)
        return True

    engine.run([RequestInput(str(i), *each) for i, each in enumerate(zip(PROMPTS, PARAMS, strict=True))], take)
    engine.close()
    return [outputs[str(index)] for index in range(len(PROMPTS))]


def cpu_seconds(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
