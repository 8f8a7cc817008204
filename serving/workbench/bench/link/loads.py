"""The loads, and one run of a load on one arm."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from serving.workbench.bench.server.figures import figures_of
from serving.workbench.bench.server.load import read_steps
from serving.workbench.bench.server.offline import Workload, random_prompts
from serving.workbench.bench.server.requests import GREEDY, Server, Task, send_and_check
from ubatch import nearest

_CUSTOM = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)")


@dataclass(frozen=True)
class Load:
    """Requests that are sent together, in random order if there are several kinds; `at_once` of them run, or all."""

    name: str
    parts: tuple[Workload, ...]
    at_once: int | None = None

    @classmethod
    def parse(cls, text: str) -> Load:
        """A named load, or PROMPTSxINxOUT. Raises ValueError."""
        if text in LOADS:
            return LOADS[text]
        if (sizes := _CUSTOM.fullmatch(text)) is None:
            raise ValueError(f"expected a load or PROMPTSxINxOUT, as in 32x512x16{nearest(text, LOADS)}")
        return cls(text, (Workload(*map(int, sizes.groups())),))

    def __str__(self) -> str:
        sizes = " and ".join(map(str, self.parts))
        return f"{self.name}: {sizes}{f', {self.at_once} at a time' if self.at_once else ''}"

    @property
    def longest(self) -> int:
        """Most tokens of a request, prompt and answer."""
        return max(each.input_len + each.output_len for each in self.parts)

    def tasks(self, model: Path) -> list[Task]:
        """The requests, of random tokens; the same at every call."""
        drawn = [(prompt, part.output_len) for part in self.parts for prompt in random_prompts(model, part)]
        random.Random(0).shuffle(drawn)
        return [Task(index, prompt, output_len, fields=GREEDY) for index, (prompt, output_len) in enumerate(drawn)]


LOADS = {
    each.name: each
    for each in (
        Load("prefill", (Workload(32, 512, 16),)),
        Load("decode", (Workload(32, 64, 128),)),
        Load("mixed", (Workload(16, 512, 16), Workload(16, 64, 64)), at_once=16),
    )
}


@dataclass(frozen=True)
class Run:
    """A load that was sent once.

    Attributes:
        seconds: until the last answer.
        ends_s: when each request ended, after the start, in order.
        answers: a digest of each request's text, in the tasks' order.
        overlapped, steps: of all ranks, during the load.
    """

    seconds: float
    ends_s: list[float]
    answers: list[str]
    overlapped: int
    steps: int


async def send_load(
    server: Server, tasks: list[Task], at_once: int | None, half_done: Callable[[], object] = lambda: None
) -> Run:
    """Send all requests; `half_done` is called when half of them have ended.

    Raises:
        RequestFailed: a request failed.
    """
    ended = 0

    def count(_: object) -> None:
        nonlocal ended
        ended += 1
        if ended == len(tasks) // 2:
            half_done()

    before = await read_steps(server)
    outcomes = await send_and_check(server, tasks, max_concurrency=at_once, on_done=count)
    steps = await read_steps(server) - before
    overlapped = sum(count for outcome, count in steps.items() if outcome.startswith("engaged"))
    return Run(
        seconds=figures_of(outcomes).duration_s,
        ends_s=sorted(round(each.sent_s + each.latency_s, 4) for each in outcomes),
        answers=[hashlib.sha256(each.text.encode()).hexdigest()[:8] for each in outcomes],
        overlapped=overlapped,
        steps=steps.total(),
    )


def warm_up(tasks: list[Task]) -> list[Task]:
    """A request for each rank, of two tokens: memory is touched, connections are open."""
    return [replace(task, max_tokens=2) for task in tasks[:2]]
