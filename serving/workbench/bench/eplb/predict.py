"""Whether the simulator says what a skewed step takes, from the stages of a balanced one.

    stages      of steps with perfect balance, two lanes one after the other
    loads       of every layer and rank of a skewed step: tokens of its experts, rows that its end of the link carries
    predicted   all ranks simulated with these stages and loads, step by step, and what a step takes around its lanes
    measured    the skewed step, in the same A B B A block

Two kinds of steps: lanes one after the other, in which nothing overlaps, and lanes under the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from moe import FusedMoEModularKernel
from moe.expert_map import map_and_count
from serving.workbench.arms.programs import Programs, predict_step
from serving.workbench.arms.stages import HANDOFF_S, with_loads
from serving.workbench.bench.eplb.skewed import SkewedModels, sparse_layers
from serving.workbench.bench.statistics import Arm, Interval, bootstrap, paired, print_arms, table
from serving.workbench.bench.step_setting import SplitCompute, StepSetting, interleave_on_ranks
from ubatch import Schedule
from ubatch.schedules import SERIAL, RankLoad

_LANES = 2


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
    lanes = balanced.schedule(_LANES)
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
