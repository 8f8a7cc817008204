"""The experts' load in a trace's page: that of the recorded time, or of a file (`ubatch trace --expert-loads`)."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moe import ExpertPlacement
from moe.balance import Floats, LoadKind, read_loads
from serving.engine.rank.tracing import EXPERT_LOADS
from serving.workbench.tracing.expert_map import draw_balance, draw_course
from ubatch import ConfigError
from ubatch.trace import RankTrace


@dataclass(frozen=True, eq=False)
class RecordedLoads:
    """The load of the experts in some time.

    Attributes:
        steps: `[steps, L, E]`; one step if it is not known what came when.
        placement: where the experts were.
        kinds: kind of steps, in words -> its part of the load, `[L, E]`; empty if it is not known.
    """

    steps: Floats
    placement: ExpertPlacement
    kinds: Mapping[str, Floats] = field(default_factory=dict)

    @cached_property
    def whole(self) -> Floats:
        """`[L, E]`: the load of all steps."""
        return np.asarray(self.steps.sum(axis=0))

    @property
    def figures(self) -> Mapping[str, Mapping[str, float]]:
        """Kind of steps, or all -> its balancedness: `worst` of the layers, and `mean` over them."""
        views = {"all steps": self.whole, **self.kinds}
        found = {name: self.placement.balancedness(loads) for name, loads in views.items()}
        return {name: {"worst": float(each.min()), "mean": float(each.mean())} for name, each in found.items()}

    @property
    def sentence(self) -> str:
        """`4 layers of 8 experts on 2 ranks; balancedness (mean / max over ranks) 0.76 in layer 2, the worst, ...`."""
        of_layers = self.placement.balancedness(self.whole)
        where = self.placement
        held = f"{where.num_layers} layers of {where.num_experts} experts on {where.num_ranks} ranks"
        even = f"balancedness (mean / max over ranks) {of_layers.min():.2f} in layer {of_layers.argmin()}, the worst"
        return f"{held}; {even}, {of_layers.mean():.2f} on average"

    def picture(self) -> str:
        """All of it, as SVG."""
        return draw_balance(self.whole, self.placement)

    def section(self) -> str:
        """HTML for `ubatch.write_html`."""
        parts = [f'<div class="bar"><b>Load of the experts</b><span>{html.escape(self.sentence)}.</span></div>']
        parts.append(self.picture())
        if len(self.steps) > 1:
            course = self.placement.balancedness(self.steps)
            parts.append(draw_course({"worst": course.min(axis=1), "mean": course.mean(axis=1)}))
        for name, loads in self.kinds.items():
            parts.append(
                f"<details><summary>{html.escape(name)}</summary>{draw_balance(loads, self.placement)}</details>"
            )
        return "".join(parts)


def loads_of_traces(ranks: Sequence[RankTrace]) -> RecordedLoads | None:
    """The load that ranks have recorded, summed over them; None if there is none, or the ranks share no experts.

    Raises:
        ConfigError: the files are not of one recording.
    """
    told: list[Any] = [rank.extra[EXPERT_LOADS] for rank in ranks if EXPERT_LOADS in rank.extra]
    if not told or told[0]["num_ranks"] == 1:
        return None
    try:
        counts = np.array([each["counts"] for each in told], dtype=np.int64).sum(axis=0)
        placement = ExpertPlacement(np.array(told[0]["slots"]), counts.shape[-1], told[0]["num_ranks"])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the ranks have not recorded the load of the same experts: {error}") from error
    whole = counts.sum(axis=0)
    if not whole.any():
        return None
    kinds = {f"{LoadKind.PREFILL} steps": counts[0], f"{LoadKind.DECODE} steps": counts[1]}
    return RecordedLoads(whole[None], placement, {name: loads for name, loads in kinds.items() if loads.any()})


def loads_of_file(path: Path, num_ranks: int | None, placed: Path | None) -> RecordedLoads:
    """The load in a file.

    Args:
        num_ranks: ranks that share the experts; None with `placed`.
        placed: file of a placement; None for the experts in the order of their ids.

    Raises:
        ConfigError: a file cannot be read, or they do not fit each other.
    """
    steps = read_loads(path)
    _, layers, experts = steps.shape
    if placed is None:
        placement = ExpertPlacement.default(layers, experts, num_ranks or 1)
    else:
        placement = ExpertPlacement.load(placed)
    if (placement.num_layers, placement.num_experts) != (layers, experts):
        raise ConfigError(
            f"{path} has the load of {experts} experts in {layers} MoE layers, but {placed} places "
            f"{placement.num_experts} experts in {placement.num_layers}."
        )
    if num_ranks not in (None, placement.num_ranks):
        raise ConfigError(f"{placed} has {placement.num_ranks} ranks, not {num_ranks}. Remove --ranks.")
    return RecordedLoads(steps, placement)
