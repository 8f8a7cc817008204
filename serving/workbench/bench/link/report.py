"""Figures of a load over a link: times, ratios, equal answers and overlapped steps of every arm, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from serving.workbench.bench.link.loads import Load, Run
from serving.workbench.bench.statistics import Interval, paired, ratio_of_sums, table

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
