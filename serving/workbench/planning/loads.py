"""The skew of a step's experts, from the loads and the placement that the flags of `ubatch simulate` name."""

from __future__ import annotations

from pathlib import Path

from moe import ExpertPlacement
from moe.balance import read_loads
from serving.workbench.arms.skew import layer_skews
from serving.workbench.planning.shapes import ModelShape
from ubatch.errors import ConfigError


def skews_of_files(
    model: ModelShape, ep: int, redundant: int, loads_file: Path, placement_file: Path | None
) -> tuple[float, ...]:
    """For every MoE layer, the busiest rank's load over the mean.

    Args:
        ep: ranks.
        redundant: experts in addition to the model's own; without a placement, they are copies of the first ones.
        loads_file: see `moe.balance.read_loads`.
        placement_file: see `ExpertPlacement.load`; None places experts in the order of their ids.

    Raises:
        ConfigError: a file cannot be read, or is of another model or other ranks.
    """
    loads = read_loads(loads_file)
    expected = model.moe_layers, model.experts
    if loads.shape[1:] != expected:
        raise ConfigError(
            f"--expert-loads: {loads_file} has {loads.shape[1]} MoE layers of {loads.shape[2]} experts, but "
            f"{model.name} has {expected[0]} of {expected[1]}. Name its model with --model."
        )
    if placement_file is None:
        return layer_skews(ExpertPlacement.default(*expected, ep, redundant), loads)
    placement = ExpertPlacement.load(placement_file)
    found = placement.num_layers, placement.num_experts, placement.num_ranks
    if found != (*expected, ep):
        raise ConfigError(
            f"--expert-placement: {placement_file} places {found[1]} experts of {found[0]} MoE layers on {found[2]} "
            f"ranks, but the step has {expected[1]} of {expected[0]} on {ep} (--ep)."
        )
    return layer_skews(placement, loads)
