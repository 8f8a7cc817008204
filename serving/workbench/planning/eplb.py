"""`ubatch eplb`: plan a placement of experts for recorded loads; what it gains, and what it moves.

    ubatch eplb loads.npy --ranks 16 --redundant 16 --out placement.yaml
    ubatch eplb loads.npy --placement placement.yaml --expert-bytes 44040192

The placement is planned for the first half of the steps and scored on the second one. `docs/expert-balance.md` says how
placements are planned; `moe.balance` plans them.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from model_runner.parallel import make_placement
from moe import ExpertPlacement
from moe.balance import arrivals, is_hierarchical, mean_balancedness, plan_placement, read_loads
from serving.arguments.fields import Flag, Group
from serving.workbench.bench.statistics import table
from ubatch.errors import ConfigError

_SUFFIXES = (".yaml", ".yml", ".json")
"""How the name of `--out` ends."""


class Options(Group):
    """What to plan for. The placement in force is that of --placement, or one in the order of experts' ids."""

    loads: Annotated[
        Path,
        Flag(positional=True, metavar="LOADS"),
        Field(description="tokens per expert, [steps, layers, experts], .npy or .json"),
    ]
    ranks: Annotated[int | None, Field(ge=1, le=1024, description="expert-parallel ranks")] = None
    redundant: Annotated[int, Field(ge=0, description="slots in addition to one per expert")] = 0
    nodes: Annotated[int, Field(ge=1, description="nodes of the ranks, equally many ranks on each")] = 1
    groups: Annotated[
        int, Field(ge=1, description="groups of experts that the router chooses first; each stays on one node")
    ] = 1
    placement: Annotated[
        Path | None, Flag(metavar="FILE"), Field(description="the placement in force, in place of --ranks")
    ] = None
    expert_bytes: Annotated[
        int | None, Field(ge=1, description="weights of an expert in one layer, to tell what moves in bytes")
    ] = None
    layers: Annotated[bool, Field(description="show every layer")] = False
    out: Annotated[Path | None, Flag(metavar="FILE"), Field(description="write the placement here, YAML or .json")] = (
        None
    )


def run(options: Options) -> int:
    """Plan, print the table, and write the placement."""
    loads = read_loads(options.loads)
    if not loads.any():
        raise ConfigError(f"{options.loads}: there are no tokens to plan for.")
    in_force = _in_force(options, *loads.shape[1:])
    if options.out is not None and options.out.suffix not in _SUFFIXES:
        raise ConfigError(f"--out {options.out}: a placement's name ends with {' or '.join(_SUFFIXES)}.")
    half = len(loads) // 2
    past, future = (loads[:half], loads[half:]) if half else (loads, loads)
    planned = plan_placement(past, in_force, nodes=options.nodes, groups=options.groups)
    print(f"{len(loads)} steps of {loads.shape[1]} MoE layers with {loads.shape[2]} experts: {_told(half, len(loads))}")
    print(f"{in_force.num_ranks} ranks with {in_force.slots_per_rank} slots a layer{_grouped(options, in_force)}")
    before, after = (mean_balancedness(each, future) for each in (in_force, planned))
    print(_table(before, after, options.layers))
    if after.mean() <= before.mean():
        print("the placement in force is as good: do nothing")
    _print_moves(in_force, planned, options.expert_bytes)
    if options.out is not None:
        try:
            planned.save(options.out)
        except OSError as error:
            raise ConfigError(f"--out: cannot write {options.out}: {error.strerror}.") from error
        print(f"wrote {options.out}")
    return 0


def _in_force(options: Options, layers: int, experts: int) -> ExpertPlacement:
    if options.placement is None:
        if options.ranks is None:
            raise ConfigError("--ranks is missing: give it, or the placement in force with --placement.")
        return make_placement(experts, range(layers), options.ranks, options.redundant)
    if options.ranks is not None or options.redundant:
        flag = "--redundant" if options.redundant else "--ranks"
        raise ConfigError(f"{flag} has no effect with --placement, which says how many there are. Remove one of them.")
    in_force = ExpertPlacement.load(options.placement)
    if (in_force.num_layers, in_force.num_experts) != (layers, experts):
        raise ConfigError(
            f"{options.placement} has {in_force.num_layers} MoE layers of {in_force.num_experts} experts, but "
            f"{options.loads} has {layers} of {experts}."
        )
    return in_force


def _told(half: int, steps: int) -> str:
    if half:
        return f"planned for the first {half}, scored on the next {steps - half}"
    return "planned for it and scored on it; give two steps for an honest score"


def _grouped(options: Options, in_force: ExpertPlacement) -> str:
    if is_hierarchical(in_force, options.nodes, options.groups):
        return f"; {options.groups // options.nodes} groups of experts on each of {options.nodes} nodes"
    if options.nodes > 1:
        return f"; any expert on any of {options.nodes} nodes, as {options.groups} groups cannot be kept together"
    return ""


def _table(before: npt.NDArray[np.float64], after: npt.NDArray[np.float64], every: bool) -> str:
    rows: list[tuple[object, ...]] = [("all layers", before.mean(), after.mean())]
    rows.append(("worst layer", before.min(), after.min()))
    if every:
        rows += [(f"layer {layer}", *both) for layer, both in enumerate(zip(before, after, strict=True))]
    return table({"balancedness": "", "in force": ".3f", "planned": ".3f"}, rows)


def _print_moves(before: ExpertPlacement, after: ExpertPlacement, expert_bytes: int | None) -> None:
    arriving = arrivals(before, after).reshape(before.num_layers, before.num_ranks, -1).sum(axis=(0, 2))
    held = int((before.experts >= 0).sum())
    told = [f"{arriving.sum()} of {held} experts move to another rank", f"{arriving.max()} of them to the busiest one"]
    if expert_bytes is not None:
        told = [
            f"{text} ({count * expert_bytes / 1e9:.3g} GB)"
            for text, count in zip(told, (arriving.sum(), arriving.max()), strict=True)
        ]
    print("; ".join(told))
