"""Expert parallelism: how tokens reach their experts, and which rank holds which.

The transport of a runner has a name and options, and says which schedules it supports. `auto` chooses, if several ranks
share experts:

    NCCL, all ranks on one machine      allgather_reducescatter     decode steps are captured
    NCCL, several machines              torch_dist                  steps run eagerly, and the host waits for counts
    gloo                                torch_dist                  the same; gloo cannot be captured

Experts are placed in the order of their ids, or as a file says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from moe import (
    All2All,
    All2AllTraits,
    EmulatedLink,
    ExpertPlacement,
    StepSizes,
    check_all2all_options,
    check_schedule,
    check_schedule_by_name,
    check_signalled_experts,
    default_all2all_options,
    experts_class,
    make_all2all,
    traits_in,
)
from ubatch import CommGroup, ConfigError, ForwardMode, Schedule, UBatchConfig
from ubatch.schedules import MAX_LANES

_logger = logging.getLogger(__name__)

AUTO = "auto"
_SPLIT = (ForwardMode.DECODE, ForwardMode.PREFILL)
LOCAL = "local"
"""The back end of a rank that shares no experts."""


def choose_all2all(*, stream_ordered: bool, one_machine: bool) -> tuple[str, str]:
    """The back end that `auto` means for several ranks that share experts, and the reason.

    Args:
        stream_ordered: collectives run in the order of the device's streams (NCCL's do), so they can be captured.
        one_machine: all ranks are on one machine.
    """
    if stream_ordered and one_machine:
        return "allgather_reducescatter", "ranks of one machine over NCCL: it waits for no counts and can be captured"
    if stream_ordered:
        return "torch_dist", "several machines: rows travel only to ranks that hold their experts; it is not captured"
    return "torch_dist", "rows travel only to ranks that hold their experts"


def resolve_all2all(name: str | None, group: CommGroup | None) -> tuple[str, str]:
    """Resolve a back end's name on these ranks, with the reason. Every rank of the group must call this.

    Args:
        name: the back end; `auto` or None chooses `local` on one rank, else by `choose_all2all`.
        group: the ranks that share the experts; None for a single rank.
    """
    if name is not None and name != AUTO:
        return name, "asked for"
    if group is None or group.size == 1:
        return LOCAL, "one rank has all experts"
    ordered = group.stream_ordered(torch.device("cuda"))
    return choose_all2all(stream_ordered=ordered, one_machine=ordered and group.on_one_machine())


def make_transport(
    name: str | None,
    group: CommGroup | None,
    link: EmulatedLink | None,
    num_experts: int,
    options: Mapping[str, object] | None = None,
    sizes: StepSizes | None = None,
) -> All2All:
    """The transport of a model. Every rank of the group must call this.

    Args:
        name, group: see `resolve_all2all`.
        link: emulated link to deliver over; None for the real one.
        sizes: sizes of the steps, to derive options that are not given; None for the back end's own defaults.

    Raises:
        ConfigError: see `moe.check_all2all_options`; or a back end or option is given for a dense model.
    """
    if num_experts == 0:
        if name not in (None, AUTO) or link is not None or options:
            raise ConfigError("a dense model has no experts to reach: leave all2all_backend, its options and link out.")
        return make_all2all(LOCAL, group=None, num_experts=1)  # never called
    name, why = resolve_all2all(name, group)
    ranks, options = 1 if group is None else group.size, dict(options or {})
    check_all2all_options(name, options, ranks)
    if sizes is not None:
        options = default_all2all_options(name, sizes, ranks) | options
    if ranks > 1:
        _logger.info("all2all back end %s (%s), options %s", name, why, options or "none")
    if link is None:
        return make_all2all(name, group=group, num_experts=num_experts, **options)
    return make_all2all("emulated_link", group=group, num_experts=num_experts, link=link, inner=name, **options)


def check_schedules(
    config: UBatchConfig, all2all: All2All, experts: str, device: torch.device, *, verifies: bool
) -> None:
    """Refuse a schedule that transport or experts do not support in its mode's steps, before any step runs.

    Raises:
        ConfigError: see `moe.check_schedule` and `moe.check_signalled_experts`.
    """

    def check(schedule: Schedule, mode: ForwardMode) -> None:
        traits = traits_in(all2all, mode, 1)
        check_schedule(schedule, all2all, traits)
        if schedule.signalled:
            check_signalled_experts(schedule, traits, experts_class(experts), device)

    _check_modes(config, check, verifies=verifies)


def check_schedules_by_name(config: UBatchConfig, all2all_backend: str, *, verifies: bool) -> None:
    """Like `check_schedules`, but only from the transport's name, before any rank starts."""
    _check_modes(config, lambda schedule, _: check_schedule_by_name(schedule, all2all_backend), verifies=verifies)


def _check_modes(config: UBatchConfig, check: Callable[[Schedule, ForwardMode], None], *, verifies: bool) -> None:
    """Check every mode whose steps may overlap; an error names the mode."""
    modes = (ForwardMode.DECODE, ForwardMode.PREFILL, *([ForwardMode.TARGET_VERIFY] if verifies else []))
    for mode in modes:
        settings = config.for_mode(mode)
        if config.enable_dbo and settings.overlaps:
            try:
                check(settings.schedule, mode)
            except ConfigError as error:
                raise ConfigError(f"{mode} steps: {error}") from None


def most_chunks(all2all: All2All) -> int:
    """Most blocks of experts that a layer can be split into, in steps of every mode."""
    return min(traits_in(all2all, mode, 1).max_chunks for mode in _SPLIT)


def most_lanes(all2all: All2All) -> int | None:
    """Most lanes of a step, in every mode; None for any number."""
    return min((most for mode in _SPLIT if (most := traits_in(all2all, mode, 1).max_lanes) is not None), default=None)


def traits_in_lanes(all2all: All2All, mode: ForwardMode, tokens: int, lanes: int) -> All2AllTraits:
    """The traits of a back end in a step of `mode` whose number of lanes is not chosen yet.

    The number of chunks is one that it supports in any number of lanes: a lane with fewer tokens may use another path.

    Args:
        tokens: tokens of the step, the most of any rank.
        lanes: number of lanes for which all other traits are returned.
    """
    ways = [traits_in(all2all, mode, -(-tokens // count)) for count in range(1, MAX_LANES + 1)]
    cuts = None if any(way.cuts_combine is None for way in ways) else ways[lanes - 1].cuts_combine
    return replace(ways[lanes - 1], max_chunks=min(way.max_chunks for way in ways), cuts_combine=cuts)


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
