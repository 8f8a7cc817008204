"""`ubatch bench eplb`: what balanced experts gain and cost, on two ranks with skewed routers over an emulated link.

    gain       without, with, and with perfect balance; with DBO and without; six times as many blocks
    same       greedy tokens with balance against those without
    predict    the simulator's times of skewed steps, from the stages of balanced ones
    counting   what counting the load costs, timed alone
    moving     steps while experts move, against steps while they do not; prompts have half of their tokens
    shift      steps until experts are balanced again when others become popular

The model is a random Qwen3-MoE of 115 M parameters with three layers, which has 64 experts of 384 in each, eight of
them for a token, unless other sizes are given; steps are prefills, and every rank is pinned to a core.
The file of `--json` is written after each part: a run that is interrupted loses only the part that ran.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from model_runner import RandomDeepseekV3, RandomQwen3Moe
from moe.balance import EplbConfig
from serving.ranks import run_ranks
from serving.workbench.bench.eplb.gain import measure_counting, measure_gain, measure_predictions
from serving.workbench.bench.eplb.moving import MOVING, compare_tokens, measure_moving
from serving.workbench.bench.eplb.shift import measure_shifts
from serving.workbench.bench.eplb.skewed import Skew, SkewedModels, open_skewed
from serving.workbench.bench.statistics import environment
from serving.workbench.bench.step_setting import StepOptions, calibrate, model_folder
from ubatch import ConfigError

_QUICK_BLOCKS = 3
_GAIN = 6
"""Blocks of `gain` for each that was asked for: a share of a difference needs more of them than a ratio."""


class Part(StrEnum):
    GAIN = "gain"
    SAME = "same"
    PREDICT = "predict"
    COUNTING = "counting"
    MOVING = "moving"
    SHIFT = "shift"


class Options(StepOptions):
    """What to measure."""

    measures = (*StepOptions.measures, "serving/balance", "serving/workbench/bench/eplb")
    of_random = (*StepOptions.of_random, "experts", "experts_per_token", "expert_size")

    only: tuple[Part, ...] = Field((*Part,), description="the parts to measure")
    quick: bool = Field(False, description="few blocks and steps: shows that it runs, not how fast")
    layers: int | None = Field(None, ge=2, description="of the random model; 3 if not given")
    experts: int = Field(64, ge=2, description="of a layer of the random model")
    experts_per_token: int = Field(8, ge=1, description="of the random model")
    expert_size: int = Field(384, ge=1, description="inner size of an expert of the random model")
    balancedness: float = Field(
        0.65, gt=0, le=1, description="mean / busiest rank of experts in the order of their ids"
    )
    exponent: float = Field(1.0, ge=0, description="of the experts' popularity")
    redundant_experts: int = Field(0, ge=0, description="experts in addition to the model's own")
    window_size: int = Field(250, ge=1, description="steps whose load is looked at")
    step_interval: int = Field(500, ge=1, description="steps from one plan to the next")
    ratio: float = Field(0.5, gt=0, description="communication as a multiple of the compute of two lanes")
    new_tokens: int = Field(128, ge=1, description="same: generated for every prompt")

    moving_steps: int = Field(
        500, ge=1, description="moving: steps while experts move, and thrice as many without; prompts are cut to half"
    )

    shifts: int = Field(3, ge=1, description="shift: how often others become popular, in each mode")

    @property
    def size(self) -> RandomQwen3Moe | RandomDeepseekV3:
        """Of the random model: fewer layers than elsewhere, with more and larger experts, more of them per token.

        Raises:
            ConfigError: a token would visit more experts than there are.
        """
        if self.experts_per_token > self.experts:
            raise ConfigError(
                f"--experts-per-token {self.experts_per_token}: a layer has {self.experts} experts. Lower it, or raise "
                "--experts."
            )
        size = replace(
            super().size,
            num_hidden_layers=self.layers or 3,
            num_experts_per_tok=self.experts_per_token,
            moe_intermediate_size=self.expert_size,
        )
        if isinstance(size, RandomQwen3Moe):
            return replace(size, num_experts=self.experts)
        return replace(size, n_routed_experts=self.experts)

    @property
    def eplb(self) -> EplbConfig:
        """How experts are balanced."""
        return EplbConfig(
            num_redundant_experts=self.redundant_experts, window_size=self.window_size, step_interval=self.step_interval
        )

    @property
    def steps_while_moving(self) -> int:
        """Steps that are measured while experts move."""
        return _QUICK_BLOCKS * MOVING if self.quick else self.moving_steps

    @property
    def rounds(self) -> int:
        """Blocks that are measured."""
        return min(self.blocks, _QUICK_BLOCKS) if self.quick else self.blocks


_MEASURES: Mapping[Part, Callable[[SkewedModels, Options], Any]] = {
    Part.GAIN: lambda models, options: measure_gain(models, options.rounds * (1 if options.quick else _GAIN)),
    Part.SAME: lambda models, options: compare_tokens(models, options.new_tokens),
    Part.PREDICT: lambda models, options: measure_predictions(models, options.rounds),
    Part.COUNTING: lambda models, options: measure_counting(models, options.rounds),
    Part.SHIFT: lambda models, options: measure_shifts(
        models, options.eplb, options.balancedness, min(options.shifts, options.rounds)
    ),
    Part.MOVING: lambda models, options: measure_moving(models, options.steps_while_moving),
}


def run(options: Options) -> int:
    """Measure the parts asked for; returns 1 if one is void or its tokens differ."""
    print(options.describe(), flush=True)
    with model_folder(options) as model:
        results: dict[str, Any] = run_ranks(_on_rank, options.ranks, options, model, environment())
    return 1 if any(getattr(result, "void", False) for result in results.values()) else 0


@torch.inference_mode()
def _on_rank(rank: int, _: int, options: Options, model: Path, machine: Mapping[str, Any]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    skew = Skew(options.balancedness, options.exponent)
    with open_skewed(rank, options, model, skew, options.eplb) as models:
        calibrate(models.settings["perfect"], 2, options.ratio)
        for part in (part for part in Part if part in options.only):  # the last ones leave experts elsewhere
            results[str(part)] = _MEASURES[part](models, options)
            if rank == 0:
                results[str(part)].print()
                options.write(results, machine)
                print(end="", flush=True)
    return results
