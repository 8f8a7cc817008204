"""Requests that run all the time while something else happens to the server."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle

import httpx

from serving.workbench.bench.faults.answers import Answer, Asked, ask
from serving.workbench.bench.server.subject import Subject

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
