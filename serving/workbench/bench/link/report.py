"""The loads, one run of a load on one arm, and its figures.

Figures are times, ratios, equal answers and overlapped steps of every arm.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from serving.workbench.bench.server.load import figures_of, read_steps
from serving.workbench.bench.server.offline import Workload, random_prompts
from serving.workbench.bench.server.requests import GREEDY, Server, Task, send_and_check
from serving.workbench.bench.statistics import Interval, paired, ratio_of_sums, table
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


_SERIES = 10


@dataclass(frozen=True)
class Halves:
    """Of runs in which the link changed when half of the requests had ended.

    Attributes:
        before, after: time of the first arm / time of this one, in each half.
        series: requests per second of every 10 that ended, for each run.
    """

    before: Interval
    after: Interval
    series: Sequence[Sequence[float]]


@dataclass(frozen=True)
class ArmFigures:
    """Figures of an arm. Ratios are times of the first arm / times of this one: above 1 this one is faster.

    Attributes:
        seconds: of every run, in order.
        speedup: median of the ratios of the runs, pair by pair.
        whole: the ratio of the sums of all runs.
        of_fastest: the sum of the fastest arm's runs / the sum of these.
        learned: the same of the last run of every visit after the first.
        same: requests with the first arm's answer, in the worst run, of `requests`.
        overlapped, steps: of all runs and ranks.
        halves: None if the link did not change.
    """

    seconds: Sequence[float]
    speedup: Interval
    whole: Interval
    of_fastest: float
    learned: float
    same: int
    requests: int
    overlapped: int
    steps: int
    halves: Halves | None


def figures_by_arm(runs: Mapping[str, Sequence[Run]], repeats: int, *, changed: bool) -> dict[str, ArmFigures]:
    """Figures of every arm, by the runs of each, of which `repeats` are of one visit; the first arm is compared with.

    Run by run, the arms are of the same sweep.
    """
    first = next(iter(runs.values()))
    base, answers = [each.seconds for each in first], first[0].answers
    of_arm = {name: [each.seconds for each in own] for name, own in runs.items()}
    later = {name: sum(seconds[2 * repeats - 1 :: repeats]) for name, seconds in of_arm.items()}
    fastest, fastest_later = min(map(sum, of_arm.values())), min(later.values())
    found = {}
    for name, own in runs.items():
        seconds = of_arm[name]
        found[name] = ArmFigures(
            seconds=seconds,
            speedup=paired(base, seconds),
            whole=ratio_of_sums(base, seconds),
            of_fastest=fastest / sum(seconds),
            learned=fastest_later / later[name],
            same=min(sum(a == b for a, b in zip(answers, each.answers, strict=True)) for each in own),
            requests=len(answers),
            overlapped=sum(each.overlapped for each in own),
            steps=sum(each.steps for each in own),
            halves=_halves(first, own) if changed else None,
        )
    return found


def pooled(loads: Mapping[str, Mapping[str, ArmFigures]]) -> dict[str, Interval]:
    """Of every arm, the first arm's time of all loads and runs together / its time."""
    own = {
        name: [each for load in loads.values() for each in load[name].seconds] for name in next(iter(loads.values()))
    }
    base = next(iter(own.values()))
    return {name: ratio_of_sums(base, seconds) for name, seconds in own.items()}


def _halves(first: Sequence[Run], own: Sequence[Run]) -> Halves:
    def split(run: Run) -> tuple[float, float]:
        half = run.ends_s[len(run.ends_s) // 2 - 1]
        return half, run.seconds - half

    before, after = (
        paired([split(each)[half] for each in first], [split(each)[half] for each in own]) for half in (0, 1)
    )
    return Halves(before, after, [_series(each.ends_s) for each in own])


def _series(ends_s: Sequence[float]) -> list[float]:
    ends = [0.0, *ends_s[_SERIES - 1 :: _SERIES]]
    return [round(_SERIES / max(1e-6, b - a), 3) for a, b in pairwise(ends)]


def print_load(load: Load, figures: Mapping[str, ArmFigures], start_s: Mapping[str, Sequence[float]]) -> None:
    """The table of a load."""
    base = next(iter(figures))
    print(f"\n{load}")
    names = ("s", f"over {base}", "whole run", "of fastest", "learned")
    head = {"": "", **dict.fromkeys(names, ".2f"), "same answers": "", "overlapped steps": "", "start s": ".1f"}
    rows = []
    for name, own in figures.items():
        ratios = (median(own.seconds), own.speedup, own.whole, own.of_fastest, own.learned)
        counts = (f"{own.same} of {own.requests}", f"{own.overlapped} of {own.steps}")
        rows.append((name, *ratios, *counts, median(start_s[name])))
    print(table(head, rows), flush=True)
    for name, own in figures.items():
        if own.halves is not None:
            series = " ".join(f"{each:.2f}" for each in own.halves.series[-1])
            print(f"  {name}: {own.halves.before:.2f} before the link changed, {own.halves.after:.2f} after it")
            print(f"    requests/s by tens, last run: {series}", flush=True)


def print_pooled(loads: Mapping[str, Mapping[str, ArmFigures]]) -> None:
    """The line below a link's tables: every arm over all of them."""
    base, *arms = found = pooled(loads)
    steps = sum(load[base].steps for load in loads.values())
    own = ", ".join(f"{name} {found[name]:.2f}" for name in arms)
    print(f"\nall loads ({steps} steps of {base}), whole runs over {base}: {own}", flush=True)
