"""Checks which schedules a layer's transport and experts support, before the first step and in every step."""

from __future__ import annotations

import torch

from moe.all2all.base import All2All, All2AllTraits
from moe.all2all.registry import all2all_class
from moe.experts.base import BlockwiseExperts, SignallingExperts
from ubatch import ConfigError, Schedule


def check_schedule(schedule: Schedule, all2all: All2All, traits: All2AllTraits) -> None:
    """Refuse a schedule that a back end does not support.

    Args:
        schedule: a step's schedule.
        all2all: the back end.
        traits: the back end's traits in that step.

    Raises:
        ConfigError: too many lanes or chunks; several combines of one dispatch, or combines that begin before their
            experts are done, if the back end does not support them.
    """
    backend = type(all2all).__name__
    if traits.max_lanes is not None and schedule.lanes > traits.max_lanes:
        raise ConfigError(
            f"schedule {schedule.name!r} has {schedule.lanes} lanes, but the all2all back end serves "
            f"{traits.max_lanes}. Lower num_ubatches."
        )
    if schedule.chunks > traits.max_chunks:
        raise ConfigError(
            f"schedule {schedule.name!r} has {schedule.chunks} chunks, but all2all back end {backend} with "
            f"{len(all2all.experts)} experts a rank serves {traits.max_chunks}. Choose a schedule with fewer."
        )
    if schedule.chunks > 1 and not schedule.chunk_dispatch and traits.cuts_combine is None:
        raise ConfigError(
            f"schedule {schedule.name!r} combines {schedule.chunks} chunks of one dispatch, but {backend} cannot "
            "have two combines of one dispatch under way. Choose a schedule with chunk_dispatch."
        )
    if schedule.signalled and not (traits.sends_blocks or traits.signals):
        raise ConfigError(_nobody_signals(schedule, backend))
    if schedule.signalled and traits.sends_blocks and schedule.chunks > 1:
        raise ConfigError(
            f"{_signalled(schedule)}, which {backend} does by blocks of experts of one dispatch, not of "
            f"{schedule.chunks}. Set chunks to 1, or leave signalled out."
        )


def check_schedule_by_name(schedule: Schedule, name: str) -> None:
    """Refuse a schedule that no back end of that class supports; needs no ranks and makes no back end.

    Args:
        schedule: a step's schedule.

    Raises:
        ConfigError: an unknown back end, or a signalled schedule and a back end without signals.
    """
    if schedule.signalled and not all2all_class(name).may_signal:
        raise ConfigError(_nobody_signals(schedule, f"all2all back end {name!r}"))


def check_signalled_experts(schedule: Schedule, traits: All2AllTraits, experts: type, device: torch.device) -> None:
    """Refuse a signalled schedule that a class of experts, or a device, does not support.

    Args:
        schedule: a step's signalled schedule, which the transport supports.
        traits: the transport's traits in that step.
        experts: class of the experts.
        device: where they are.

    Raises:
        ConfigError: the experts cannot run as the transport needs, or the schedule reserves no SMs on a GPU.
    """
    name = experts.__name__
    if traits.sends_blocks:
        if not issubclass(experts, BlockwiseExperts):
            raise ConfigError(
                f"{_signalled(schedule)}, but {name} run all at once (they have no run_blocks). Use experts "
                "'grouped', or a schedule in chunks, such as 'single_batch'."
            )
        return
    if not issubclass(experts, SignallingExperts):
        raise ConfigError(
            f"{_signalled(schedule)}, but {name} do not say what is done (they have no project_down_signalling). Use "
            "experts 'triton_batched', or a schedule that is not."
        )
    if device.type == "cuda" and not schedule.comm_sms:
        raise ConfigError(
            f"{_signalled(schedule)}, but has no SMs of its own: if the combine took all of them to wait on, nothing "
            "could finish. Set comm_sms, such as 16."
        )


def _signalled(schedule: Schedule) -> str:
    return f"schedule {schedule.name!r} is signalled: a combine begins while its experts are still computed"


def _nobody_signals(schedule: Schedule, backend: str) -> str:
    return (
        f"{_signalled(schedule)}, which {backend} cannot do: what it launches waits for no signal, and takes the "
        "results of a dispatch in one piece. Use a schedule in chunks, such as 'single_batch', or all2all back end "
        "'torch_dist' or 'host_loopback_batched'."
    )
