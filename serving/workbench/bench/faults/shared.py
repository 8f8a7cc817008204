"""What the sections of `ubatch bench faults` share: options, requests, their right answers, who judges; what was
promised, with which they compare what they saw; and requests that run meanwhile."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from typing import Annotated, Any

import httpx
import numpy as np
from pydantic import Field

from serving.arguments.fields import Flag
from serving.workbench.bench.faults.answers import Answer, Asked, ask
from serving.workbench.bench.faults.referee import Referee, Tally, Verdict
from serving.workbench.bench.options import SERVER, Checkpoint, Dtype, ReportOptions
from serving.workbench.bench.server.process import Ended, Footprint, Subject, by_reason, subject

EXPERT_PARALLEL = ("--data-parallel-size=2", "--enable-expert-parallel")
LANES = ("--enable-dbo", "--dbo-decode-token-threshold=4", "--dbo-prefill-token-threshold=8")
UNLIMITED = "--max-engine-restarts=1000"
AGAIN_S = 120.0
"""A server that is not healthy so many seconds after a fault does not come back."""
MOST_EXCUSED = 0.01


SECTIONS = ("kill", "others", "poison", "limit", "pause", "cost", "soak", "nodes")


class Options(ReportOptions):
    """What to disturb, and how often."""

    unwritten = frozenset({"model"})
    measures = (*SERVER, "serving/workbench/bench/faults")

    model: Annotated[Checkpoint, Flag(positional=True)] = Field(
        description="folder of a Hugging Face checkpoint; of up to 1,024 tokens, so that edges of draws are exact"
    )
    only: tuple[str, ...] = Field((), description=f"sections: {', '.join(SECTIONS)}; all if none")
    kills: int = Field(10, ge=1, description="engines killed in each configuration")
    streams: int = Field(64, ge=8, description="requests that run all the time")
    output_len: int = Field(200, ge=16, description="their tokens")
    pauses: int = Field(5, ge=1, description="kills whose pause is measured, and cold starts")
    blocks: int = Field(40, ge=2, description="A B B A blocks of cost; 160 for figures to quote")
    minutes: float = Field(2.0, gt=0, description="of soak")
    every_s: float = Field(20.0, gt=0, description="seconds between two kills of soak")
    timeout_s: float = Field(5.0, ge=2, description="the servers', where a rank hangs or a link is cut")
    dtype: Dtype = Field("float32", description="in bfloat16 texts may differ; their rate is shown")
    quick: bool = Field(False, description="the least of everything, to try the command")

    @property
    def flags(self) -> tuple[str, ...]:
        """Of every server."""
        return (f"--dtype={self.dtype}",)


@dataclass(frozen=True)
class Setting:
    """What all sections get.

    Attributes:
        requests: more than run at a time, so that one with a near-tie does not come too often.
    """

    options: Options
    requests: Sequence[Asked]
    references: Sequence[Answer]
    referee: Referee

    @property
    def exact(self) -> bool:
        """Whether a difference is a fault: in float32."""
        return self.options.dtype == "float32"

    def server(self, *flags: str, **how: Any) -> AbstractContextManager[Subject]:
        """A server with the common flags and these; `how` as of `subject`."""
        return subject(self.options.model, [*self.options.flags, *flags], **how)


@dataclass(frozen=True)
class Found:
    """What a section has found.

    Attributes:
        figures: for the file of results.
        faults: what was not as promised.
    """

    figures: Any
    faults: list[str] = field(default_factory=list)


# -- the promises ------------------------------------------------------------------------------------------------------


_NOISE = {"resident": 0.03, "descriptors": 2.0, "threads": 32.0}
"""Growth that is none: a share of the memory, and numbers of descriptors and threads. An event loop's executor starts a
thread when none is idle, and keeps it, up to 32; of threads, at most half as many as there were kills."""


def faults_of_answers(tally: Tally, *, exact: bool) -> list[str]:
    """Faults in the answers that came while a server was disturbed."""
    lost, wrong, excused = (tally.counts[each] for each in (Verdict.LOST, Verdict.WRONG, Verdict.EXCUSED))
    first = {each: next(iter(tally.told(each)), "") for each in Verdict}
    broken = {
        "no request was answered": not tally.requests,
        f"{lost} of {tally.requests} requests were lost: {first[Verdict.LOST]}": lost,
        f"{wrong} of {tally.requests} requests got another text: {first[Verdict.WRONG]}": wrong and exact,
        f"{excused} of {tally.requests} texts differ where rounding decides": (
            excused > max(1.0, MOST_EXCUSED * tally.requests) and exact
        ),
    }
    return [what for what, is_so in broken.items() if is_so]


def faults_of_end(ended: Ended, *, status: int = 0) -> list[str]:
    """Faults in the end of a server that had to end with this exit status."""
    broken = {
        f"the server ended with status {ended.status}": ended.status != status,
        f"{len(ended.processes)} processes were left over: {ended.processes[:2]}": ended.processes,
        f"files were left over: {ended.files[:3]}": ended.files,
    }
    return [what for what, is_so in broken.items() if is_so]


def faults_of_restarts(restarts: Mapping[str, int], most: int) -> list[str]:
    """Faults in the restarts that `/metrics` counts, after so many failures."""
    count = sum(by_reason(restarts).values())
    broken = {
        "/metrics counts no restart": not count,
        f"/metrics counts {count} restarts after {most} failures": count > most,
        "/metrics counts no resumed request": not restarts.get("resumed"),
    }
    return [what for what, is_so in broken.items() if is_so]


@dataclass(frozen=True)
class Trend:
    """A straight line through a series: growth over its whole length, with the 95% interval of that."""

    growth: float
    low: float
    high: float


def trend(values: Sequence[float]) -> Trend | None:
    """The least-squares line through values at equal distances; None if there are fewer than four."""
    count = len(values)
    if count < 4:
        return None
    place = np.arange(count, dtype=float) - (count - 1) / 2
    slope = float(place @ np.asarray(values, dtype=float) / (place @ place))
    rest = np.asarray(values, dtype=float) - np.mean(values) - slope * place
    error = float(np.sqrt(rest @ rest / (count - 2) / (place @ place)))
    length = count - 1
    return Trend(slope * length, (slope - 2 * error) * length, (slope + 2 * error) * length)


def faults_of_series(series: Sequence[Footprint]) -> list[str]:
    """What has grown in a process: the lower end of the trend's interval is above the noise."""
    faults = []
    for name, noise in _NOISE.items():
        values = [float(getattr(each, name)) for each in series]
        line = trend(values)
        limit = noise * values[0] if name == "resident" and values else min(noise, len(values) / 2)
        # A line through one step is steeper than the step.
        if line is not None and line.low > 0 and min(line.growth, max(values) - values[0]) > limit:
            faults.append(f"{name} of the API process grew from {values[0]:.0f} to {values[-1]:.0f}")
    return faults


# -- requests that run all the time while something else happens to the server -----------------------------------------


_AFTER_ERROR_S = 0.5
_END_S = 300.0


@dataclass
class Load:
    """Requests that are asked again and again, each as soon as its last answer has come.

    Attributes:
        answers: request's index and its answer, in the order in which they came.
        times: of each request that runs, and its successors, when something came, by `time.monotonic()`.
        kills: engines that were killed meanwhile.
    """

    requests: Sequence[Asked]
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)
    kills: int = 0

    def cases(self, references: Sequence[Answer]) -> list[tuple[Asked, Answer, Answer]]:
        """For the referee."""
        return [(self.requests[index], references[index], answer) for index, answer in self.answers]


@asynccontextmanager
async def running_load(
    subject: Subject, requests: Sequence[Asked], at_once: int, *, wait: bool = True
) -> AsyncIterator[Load]:
    """Keep so many of the requests running in the block, all in turn; after it, wait for the last answers, or drop
    them."""
    load, stop = Load(requests, times=[[] for _ in range(at_once)]), asyncio.Event()

    async def repeat(client: httpx.AsyncClient, index: int) -> None:
        places = cycle(range(index, len(requests), at_once))
        while not stop.is_set():
            place = next(places)
            answer = await ask(
                subject.server, client, requests[place], lambda _: load.times[index].append(time.monotonic())
            )
            load.answers.append((place, answer))
            if answer.error is not None:
                if not subject.alive:
                    return
                await asyncio.sleep(_AFTER_ERROR_S)

    async with subject.server.client() as client:
        running = [asyncio.create_task(repeat(client, index)) for index in range(at_once)]
        try:
            yield load
            stop.set()
            done, late = await asyncio.wait(running, timeout=_END_S if wait else 0)
            for task in done:
                task.result()
            for index, task in enumerate(running):
                if task in late and wait:
                    error = f"no answer {_END_S:g} s after the last fault"
                    load.answers.append((index, Answer([], error=error)))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


class NotHealthy(Exception):
    """The server did not become healthy again; the message says after what."""


async def kill_engines(
    subject: Subject,
    load: Load,
    count: int,
    rng: random.Random,
    *,
    between_s: tuple[float, float],
    again_s: float,
    twice: bool = True,
) -> None:
    """Kill a random engine that many times, each time some seconds after the server is healthy; with `twice`
    every fifth time once more while the engines are started. The load counts them.

    Raises:
        NotHealthy: it was not healthy `again_s` seconds after one of them.
    """
    while load.kills < count:
        await _healthy(subject, load, again_s)
        await asyncio.sleep(rng.uniform(*between_s))
        if engines := list(subject.engines().values()):
            load.kills += kill(rng.choice(engines))
        if twice and load.kills % 5 == 4 and load.kills < count:
            await subject.wait_sick(again_s)
            await asyncio.sleep(rng.uniform(0.0, 0.3))  # a start takes less than a second
            if starting := subject.starting():
                load.kills += kill(rng.choice(starting))
    await _healthy(subject, load, again_s)


async def _healthy(subject: Subject, load: Load, again_s: float) -> None:
    if await subject.wait_healthy(again_s) is None:
        what = f"not healthy {again_s:g} s" if subject.alive else "the server has ended"
        raise NotHealthy(f"{what} after kill {load.kills}")


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal; whether the process was there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
