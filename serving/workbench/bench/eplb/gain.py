"""What balanced experts gain, and what counting their load costs.

Gain: steps without, with, and with perfect balance; in one lane, and in two under DBO.

of_possible   (with - without) / (perfect - without), in throughput
possible      perfect / without, in throughput; below `LEAST_POSSIBLE` there is nothing to measure
both          throughput of DBO and balance together over that of the better one alone

Counting: the counts of all layers, and a copy of them, timed alone. The kernel is called as a step calls it when it has
no map to apply; with a map the counts come with it. A copy is made every step here, which is more often than a server
makes one.

Prediction: whether the simulator says what a skewed step takes, from the stages of a balanced one.

    stages      of steps with perfect balance, two lanes one after the other
    loads       of every layer and rank of a skewed step: tokens of its experts, rows that its end of the link carries
    predicted   all ranks simulated with these stages and loads, step by step, and what a step takes around its lanes
    measured    the skewed step, in the same A B B A block

Two kinds of steps: lanes one after the other, in which nothing overlaps, and lanes under the schedule.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe import FusedMoEModularKernel
from moe.expert_map import map_and_count
from serving.workbench.arms.cells import Cell, Grid, make_batch
from serving.workbench.arms.programs import Programs, predict_step
from serving.workbench.arms.stages import HANDOFF_S, with_loads
from serving.workbench.bench.eplb.skewed import SkewedModels, expert_loads, sparse_layers
from serving.workbench.bench.statistics import (
    Arm,
    Interval,
    Rows,
    bootstrap,
    fastest,
    paired,
    print_arms,
    resampled,
    table,
)
from serving.workbench.bench.step_setting import SplitCompute, StepSetting, interleave_on_ranks
from ubatch import Schedule
from ubatch.schedules import SERIAL, RankLoad

LEAST_POSSIBLE = 1.15
_LANES = {"serial": 1, "dbo": 2}
_TURNS = {"serial": 1, "dbo": 3}
"""How often a block compares balanced steps, A B B A: in two lanes they scatter twice as much."""


@dataclass(frozen=True)
class GainResult:
    """Figures of steps over one link.

    Attributes:
        balancedness: mean / busiest rank in the measured batch, mean over the layers, by setting.
        gain: throughput with over without; in one lane (`serial`), and in two (`dbo`).
        possible, of_possible: see the module's top, likewise.
        both: see the module's top.
        arms_ms: raw block means, slowest rank, by setting and lanes.
    """

    bytes_per_s: float
    balancedness: Mapping[str, float]
    gain: Mapping[str, Interval]
    possible: Mapping[str, Interval]
    of_possible: Mapping[str, Interval]
    both: Interval
    arms_ms: Mapping[str, Sequence[float]]

    @property
    def void(self) -> bool:
        """Whether perfect balance gains too little in one lane for the share of it to mean anything."""
        return self.possible["serial"].median < LEAST_POSSIBLE

    def print(self) -> None:
        shown = ", ".join(f"{name} {value:.3f}" for name, value in self.balancedness.items())
        print(f"\ngain (link {self.bytes_per_s / 1e6:.1f} MB/s; balancedness: {shown})")
        print_arms(self.arms_ms, ".1f")
        rows = [(lanes, self.gain[lanes], self.possible[lanes], self.of_possible[lanes]) for lanes in _LANES]
        print(table({"lanes": "", "gain": ".3f", "possible": ".3f", "of_possible": ".3f"}, rows))
        print(f"  DBO and balance over the better one alone   {self.both:.3f}")
        if self.void:
            print(f"  void: perfect balance gains less than {LEAST_POSSIBLE:g}x, there is nothing to measure")


def measure_gain(models: SkewedModels, blocks: int) -> GainResult:
    """Run all arms, and compute the figures. Every rank calls it; all get the same."""
    arms: dict[str, Arm] = {}
    for lanes, count in _LANES.items():
        steps = {name: partial(each.timed, each.schedule(count)) for name, each in models.settings.items()}
        arms[f"without {lanes}"] = steps["without"]
        balanced = {f"{name} {lanes}": steps[name] for name in ("with", "perfect")}
        arms[f"balanced {lanes}"] = _side_by_side(balanced, _TURNS[lanes])
    found = interleave_on_ranks(arms, blocks, "gain")

    def of(name: str, lanes: str) -> Sequence[float]:
        return found[f"{name} {lanes}"]

    alone = fastest(found, ("with serial", "without dbo"))
    balancedness = {name: models.balancedness(name) for name in models.settings}
    gain, possible = (
        {lanes: paired(of("without", lanes), of(name, lanes)) for lanes in _LANES} for name in ("with", "perfect")
    )
    shares = {
        lanes: share_of_possible(*(of(name, lanes) for name in ("without", "with", "perfect"))) for lanes in _LANES
    }
    both = paired(found[alone], of("with", "dbo"))
    return GainResult(models.link.bytes_per_s, balancedness, gain, possible, shares, both, found)


def _side_by_side(steps: Mapping[str, Callable[[], float]], turns: int) -> Arm:
    """An arm of two kinds of steps, A B B A, the next turn B A A B: they differ little, so they follow each other."""
    order = [*steps]

    def run() -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(turns):
            for name in (*order, *reversed(order)):
                times[name].append(steps[name]())
            order.reverse()
        return {name: fmean(values) for name, values in times.items()}

    return run


def share_of_possible(without: Sequence[float], balanced: Sequence[float], perfect: Sequence[float]) -> Interval:
    """(with - without) / (perfect - without) of throughputs, from times by block.

    Throughputs are relative to the perfect one: medians of block-by-block ratios, as a share of single blocks would
    divide by a difference that noise brings near zero. The interval is that of resampled blocks (seeded).
    """
    times = np.asarray([without, balanced, perfect])
    relative = times[2] / times[:2]

    def share(rows: Rows) -> Any:
        least, own = np.median(relative[:, rows], axis=-1)
        return (own - least) / (1 - least)

    return resampled(len(without), share)


# -- counting ----------------------------------------------------------------------------------------------------------


_CALLS, _CONTEXT = 50, 128


@dataclass(frozen=True)
class CountingResult:
    """Figures by kind of step, `prefill` (the measured batch) and `decode` (one token of as many requests).

    Attributes:
        counting_us: of all layers of a step, and of one copy of the counts.
        share: of the step's time.
        arms_ms: raw block means, slowest rank.
    """

    counting_us: Mapping[str, Interval]
    share: Mapping[str, Interval]
    arms_ms: Mapping[str, Sequence[float]]

    def print(self) -> None:
        print("\ncounting, timed alone")
        rows = [(kind, self.counting_us[kind], self.share[kind]) for kind in self.share]
        print(table({"step": "", "us": ".1f", "share": ".3%"}, rows))


def measure_counting(models: SkewedModels, blocks: int) -> CountingResult:
    """Time counting, and steps beside it. Every rank calls it; all get the same."""
    setting = models.settings["without"]
    runner, batch = setting.runner, setting.batch
    loads = expert_loads(runner)
    layers, top_k = len(sparse_layers(runner)), runner.config.num_experts_per_tok
    random = torch.Generator().manual_seed(0)

    def counting(tokens: int) -> Callable[[], float]:
        ids = torch.rand(tokens, runner.config.num_experts, generator=random).topk(top_k).indices

        def run() -> float:
            before = time.perf_counter()
            for _ in range(_CALLS):
                for layer in range(layers):
                    map_and_count(ids, None, loads.of_layer(layer))
                loads.snapshot()
            return (time.perf_counter() - before) * 1e3 / _CALLS

        return run

    sizes = {"prefill": batch.num_tokens, "decode": len(batch.shares)}
    arms: dict[str, Arm] = {f"{kind} counting": counting(tokens) for kind, tokens in sizes.items()}
    grid = Grid(("decode",), sizes["decode"], 0, _CONTEXT, 0, 0)
    with make_batch(runner, Cell("decode", sizes["decode"]), grid, dist.get_rank()) as decodes:
        decode = StepSetting(runner, decodes, models.link)
        arms |= {"prefill": partial(setting.timed, SERIAL), "decode": partial(decode.timed, SERIAL)}
        found = interleave_on_ranks(arms, blocks, "counting")
        decode.close()
    counting_us = {kind: bootstrap([ms * 1e3 for ms in found[f"{kind} counting"]]) for kind in sizes}
    share = {kind: paired(found[f"{kind} counting"], found[kind]) for kind in sizes}
    return CountingResult(counting_us, share, found)


# -- prediction --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """A step's milliseconds, of blocks; `ratio` is predicted / measured, block by block."""

    predicted_ms: Interval
    measured_ms: Interval
    ratio: Interval


@dataclass(frozen=True)
class PredictResult:
    """Figures of steps over one link.

    Attributes:
        steps: by setting and kind of step.
        loads: by setting, layer and rank.
        arms_ms: raw block means, slowest rank.
    """

    steps: Mapping[str, Prediction]
    loads: Mapping[str, Sequence[Sequence[RankLoad]]]
    arms_ms: Mapping[str, Sequence[float]]

    def print(self) -> None:
        print("\npredicted from balanced stages")
        print_arms(self.arms_ms, ".1f")
        rows = [(name, step.predicted_ms, step.measured_ms, step.ratio) for name, step in self.steps.items()]
        print(table({"step": "", "predicted": ".1f", "measured": ".1f", "predicted / measured": ".3f"}, rows))


def measure_predictions(models: SkewedModels, blocks: int) -> PredictResult:
    """Run all arms, and predict. Every rank calls it; all get the same."""
    balanced = models.settings["perfect"]
    lanes = balanced.schedule(_LANES["dbo"])
    kinds = {"one by one": lanes.one_by_one(), "overlapped": lanes}
    split = SplitCompute(balanced, lanes)
    arms: dict[str, Arm] = {"split": split}
    for name in ("without", "with"):
        for kind, schedule in kinds.items():
            arms[f"{name}, {kind}"] = partial(models.settings[name].timed, schedule)
    loads = {name: rank_loads_of(models.settings[name], balanced) for name in ("without", "with")}
    found = interleave_on_ranks(arms, blocks, "predict")
    balanced_steps, around_ms = split.steps(), split.around_ms()
    steps = {}
    for name, of_layers in loads.items():
        for kind, schedule in kinds.items():
            predicted = [
                predicted_s(balanced_steps[2 * block : 2 * block + 2], schedule, of_layers) * 1e3 + around_ms
                for block in range(blocks)
            ]
            measured = found[f"{name}, {kind}"]
            steps[f"{name}, {kind}"] = Prediction(
                bootstrap(predicted), bootstrap(measured), paired(predicted, measured)
            )
    return PredictResult(steps, loads, found)


def predicted_s(
    balanced: Sequence[Sequence[Programs]], schedule: Schedule, loads: Sequence[Sequence[RankLoad]]
) -> float:
    """Seconds of the lanes of a step, from balanced ones (step -> rank -> lanes) and the loads of every layer and
    rank."""
    of_ranks = list(zip(*loads, strict=True))
    steps = [
        [[with_loads(lane, own) for lane in lanes] for lanes, own in zip(step, of_ranks, strict=True)]
        for step in balanced
    ]
    return predict_step(steps, schedule, HANDOFF_S)


def rank_loads_of(setting: StepSetting, balanced: StepSetting) -> list[list[RankLoad]]:
    """The loads of every layer and rank in a step, over those of a balanced step. Every rank calls it.

    A row travels once to every other rank that holds one of its experts.
    """
    own, even = (_counted(each) for each in (setting, balanced))
    factors = own / even.mean(dim=1, keepdim=True)
    return [[RankLoad(*rank) for rank in layer] for layer in factors.tolist()]


def _counted(setting: StepSetting) -> Tensor:
    """`[L, R, 3]` of a step: tokens of a rank's experts, rows that it receives from others, and rows that it sends."""
    seen: list[Tensor] = []
    kernels = [mlp.kernel for mlp in sparse_layers(setting.runner)]

    def note(kernel: FusedMoEModularKernel, arguments: tuple[Tensor, ...]) -> None:
        seen.append(map_and_count(arguments[2], kernel.expert_map, None).clone())

    hooks = [kernel.register_forward_pre_hook(note) for kernel in kernels]
    setting.step(SERIAL)
    for hook in hooks:
        hook.remove()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    each = kernels[0].all2all.num_experts // ranks
    table = torch.zeros(len(seen), ranks, 3, dtype=torch.float64)
    for layer, slots in enumerate(seen):
        to = slots // each
        for other in range(ranks):
            table[layer, other, 0] = int((to == other).sum())
            if other != rank:
                rows = int((to == other).any(dim=1).sum())
                table[layer, other, 1] += rows
                table[layer, rank, 2] += rows
    dist.all_reduce(table)
    return table
