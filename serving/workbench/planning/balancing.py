"""The gates of balanced experts: predicted gains of placements against published ones.

Only the shapes of the runs are published, not the skew of their experts: `constants.yaml` says what is assumed of it,
and which gain that was fitted to. From there on nothing is fitted: this project's planner places the experts, and a
step lasts as long as its busiest rank in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from moe import ExpertPlacement
from moe.balance import plan_placement
from serving.workbench.arms.skew import layer_skews, zipf_loads
from serving.workbench.planning.constants import PublishedBalance, load_constants
from serving.workbench.planning.costs import LayerCosts
from serving.workbench.planning.gates import Gate
from serving.workbench.planning.plan import plain_step, predict_step
from serving.workbench.planning.shapes import Mode, ModelShape, Workload, read_model
from ubatch import SCHEDULES
from ubatch.schedules import SERIAL

_LIMIT = 0.05


def balancing_gates() -> list[Gate]:
    """All comparisons."""
    return [gate for run in load_constants().balancing for gate in _gates(run)]


def _gates(run: PublishedBalance) -> Iterator[Gate]:
    sizes: dict[str, Any] = dict(run.model)
    model = replace(read_model("deepseek-v3"), **sizes)
    shape = model.moe_layers, model.experts
    loads = zipf_loads(*shape, np.linspace(*run.zipf, model.moe_layers)) if run.zipf is not None else np.ones(shape)

    def planned(redundant: int) -> tuple[float, ...]:
        return layer_skews(plan_placement(loads, ExpertPlacement.default(*shape, run.ep, redundant)), loads)

    if run.balancedness is None:
        without = layer_skews(ExpertPlacement.default(*shape, run.ep, run.redundant_experts), loads)
    else:
        without = (1 / run.balancedness,) * model.moe_layers
    seconds = _seconds(run, model, without, run.redundant_experts)
    assumed = f"{1 / fmean(without):.2f}"
    for what, expected in run.gains.items():
        redundant, skews = run.redundant_experts, (1.0,) * model.moe_layers
        if what != "perfect":
            redundant = 0 if what == "rearranged" else int(what.removesuffix(" redundant"))
            skews = planned(redundant)
        gain = seconds / _seconds(run, model, skews, redundant) - 1
        distance = abs((1 + gain) / (1 + expected) - 1)
        fitted = ", fitted" if what == run.fitted_to else ""
        yield Gate(f"{run.name}, {what} (from {assumed}{fitted})", gain, f"{expected:+.1%}", distance, _LIMIT)


def _seconds(run: PublishedBalance, model: ModelShape, skews: tuple[float, ...], redundant: int) -> float:
    load = Workload(Mode(run.mode), run.tokens, run.context, run.ep, redundant_experts=redundant, skews=skews)
    costs, schedule = LayerCosts(model, load_constants().machine(run.hardware), load), SCHEDULES[run.step]
    return (plain_step(costs) if schedule == SERIAL else predict_step(costs, schedule)).seconds
