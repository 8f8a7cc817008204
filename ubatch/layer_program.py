"""What one lane does in the MoE layers of a model, for the simulator: the points of the modular kernel, in its order.

    prepare | core | dispatch.0 dispatch.1 .. | wait 0, experts 0, combine.0, wait 1, experts 1, combine.1 .. | wait all

With chunks, every chunk of the dispatch is launched at once, so that the link never idles while there is something to
send, and a chunk's combine leaves as soon as its experts are done. There is no point between chunks: with one, the
peer would take over just when this lane's next chunk has arrived (0.3 : 0.7 on 2 lanes x 2 chunks, 0.95 of the bound
instead of 0.99).

This module imports neither torch nor threads.
"""

from __future__ import annotations

from dataclasses import dataclass

from ubatch.errors import ConfigError
from ubatch.schedule import Point, Schedule, SharedExpert
from ubatch.simulate import Compute, Launch, Op, Pass, Wait

__all__ = ["LayerTimes", "layer_program"]


@dataclass(frozen=True)
class LayerTimes:
    """Seconds that one lane spends in one MoE layer, all chunks together.

    Attributes:
        attn_prepare: norm and qkv projection.
        attn_core: attention, output projection and router.
        dispatch, combine: on the link.
        experts: the routed experts.
        shared: the shared expert.

    Raises:
        ConfigError: a negative time.
    """

    attn_core: float
    experts: float
    dispatch: float
    combine: float
    attn_prepare: float = 0.0
    shared: float = 0.0

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not seconds >= 0:
                raise ConfigError(f"LayerTimes.{name} must be at least 0 seconds, not {seconds}.")

    def scaled(self, factor: float) -> LayerTimes:
        """All times multiplied by `factor`, as for a smaller share of the batch."""
        return LayerTimes(**{name: value * factor for name, value in vars(self).items()})

    @property
    def compute_s(self) -> float:
        """Everything that is not on the link."""
        return self.attn_prepare + self.attn_core + self.experts + self.shared

    @property
    def communication_s(self) -> float:
        """What is on the link."""
        return self.dispatch + self.combine


def layer_program(times: LayerTimes, layers: int, schedule: Schedule) -> list[Op]:
    """What one lane does in `layers` MoE layers."""
    program: list[Op] = []
    for layer in range(layers):
        shared: dict[SharedExpert, list[Op]] = {where: [] for where in SharedExpert}
        shared[schedule.shared_expert].append(Compute(times.shared))
        program += [Compute(times.attn_prepare), Pass(Point.ATTN_PREPARE)]
        program += [Compute(times.attn_core), Pass(Point.SELECT)]
        program += [*_dispatches(times, layer, schedule), *shared[SharedExpert.DISPATCH], Pass(Point.DISPATCH)]
        program += [*_chunks(times, layer, schedule), *shared[SharedExpert.COMBINE], Pass(Point.COMBINE)]
        program += [*shared[SharedExpert.COMBINE_RETURN]]
        program += [Wait(f"combine.{layer}.{chunk}") for chunk in range(schedule.chunks)]
        program += [Pass(Point.OUTPUT), Pass(Point.LAYER)]
    return program


def _dispatches(times: LayerTimes, layer: int, schedule: Schedule) -> list[Op]:
    """All of them; the receive hook is the first one's."""
    count = _dispatch_chunks(schedule)
    return [Launch(f"dispatch.{layer}.{chunk}", times.dispatch / count, hooked=not chunk) for chunk in range(count)]


def _chunks(times: LayerTimes, layer: int, schedule: Schedule) -> list[Op]:
    """Experts, chunk by chunk, each followed by its combine; those are hooked unless the shared expert comes first."""
    hooked = schedule.shared_expert is not SharedExpert.COMBINE_RETURN
    ops: list[Op] = []
    for chunk in range(schedule.chunks):
        if chunk < _dispatch_chunks(schedule):
            ops.append(Wait(f"dispatch.{layer}.{chunk}"))
        ops.append(Compute(times.experts / schedule.chunks))
        ops.append(Launch(f"combine.{layer}.{chunk}", times.combine / schedule.chunks, hooked=hooked))
    return ops


def _dispatch_chunks(schedule: Schedule) -> int:
    return schedule.chunks if schedule.chunk_dispatch else 1
