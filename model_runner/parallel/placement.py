"""Which rank holds which experts of a model: in the order of their ids, or as a file says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moe import ExpertPlacement
from ubatch import ConfigError

TRIVIAL = "trivial"
"""SGLang's name of the placement in the order of the experts' ids."""


def make_placement(
    num_experts: int,
    moe_layers: Sequence[int],
    num_ranks: int,
    redundant: int = 0,
    given: ExpertPlacement | None = None,
) -> ExpertPlacement:
    """The placement of a model's experts; every rank holds at least one, if only a replica.

    Args:
        num_experts: routed experts of a layer.
        moe_layers: numbers of the layers with experts.
        num_ranks: ranks that share the experts.
        redundant: slots of a layer beyond one per expert.
        given: a placement to use instead of the default one.

    Raises:
        ConfigError: `given` is for another model, other ranks or other slots; or there are more redundant experts
            than ranks have use for.
    """
    most = num_experts * (num_ranks - 1)
    if redundant > most:
        raise ConfigError(
            f"{redundant} redundant experts are too many: with {most}, each of {num_ranks} ranks holds all "
            f"{num_experts} experts of a layer. Give at most {most}."
        )
    default = ExpertPlacement.default(len(moe_layers), num_experts, num_ranks, redundant)
    placement = default if given is None else given
    for what, own, wanted in (
        ("experts in a layer", placement.num_experts, num_experts),
        ("ranks", placement.num_ranks, num_ranks),
        ("MoE layers", placement.num_layers, len(moe_layers)),
    ):
        if own != wanted:
            raise ConfigError(f"the placement is for {own} {what}, but there are {wanted}. Make one that fits.")
    if redundant and placement.num_slots != default.num_slots:
        raise ConfigError(
            f"the placement has {placement.num_slots} slots, but {redundant} redundant experts make "
            f"{default.num_slots}. Leave num_redundant_experts out: the placement has them."
        )
    firsts = placement.experts[:, :: placement.slots_per_rank]  # a rank's idle slots, which are negative, are its last
    return placement.filled() if (firsts < 0).any() else placement


def read_placement(
    path: str | Path, num_experts: int, num_layers: int, moe_layers: Sequence[int], num_ranks: int, redundant: int = 0
) -> ExpertPlacement | None:
    """The placement in a file, checked; see `ExpertPlacement.load` and `make_placement`.

    Args:
        path: the file; `TRIVIAL` for no placement.
        num_layers: layers of the model, dense ones included: SGLang's files have a row for each of these.

    Returns:
        None for `TRIVIAL`.

    Raises:
        ConfigError: the file cannot be read, or does not fit.
    """
    if str(path) == TRIVIAL:
        return None
    placement = ExpertPlacement.load(path, num_ranks)
    if placement.num_layers == num_layers != len(moe_layers):
        placement = replace(placement, experts=placement.experts[list(moe_layers)])
    try:
        return make_placement(num_experts, moe_layers, num_ranks, redundant, placement)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
