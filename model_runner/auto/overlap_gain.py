"""How much faster a step would be under a schedule, from the stages of a serial step: the simulator's answer."""

from __future__ import annotations

import math
from dataclasses import replace

from model_runner.auto.step_stages import Stages
from ubatch.schedules.layer_program import LayerTimes, layer_program
from ubatch.schedules.schedule import SERIAL, Schedule
from ubatch.schedules.simulate import simulate

__all__ = ["expected_log_ratio"]

_SPLIT_SHARE = 0.15
"""Share of a stage's time that every lane takes again, however few tokens it has, until steps tell: on a CPU the
matrix products of half a batch take some 12 to 25% longer in sum."""
_LEAST_WAITS = 0.05
"""Share of a step's time below which its waits are not worth a simulation."""
_HANDOFF_S = 30e-6
_MOST_LAYERS, _MOST_OF_TWO_KINDS = 3, 12
"""More layers repeat what these show."""


def expected_log_ratio(stages: Stages, schedule: Schedule) -> float:
    """log(time under `schedule` / serial time) of a step whose serial stages are given.

    Without transfers there is nothing to hide, and splitting costs; the result is then positive.
    """
    if stages.waits < _LEAST_WAITS * stages.seconds:  # no need to simulate: splitting costs more
        return math.log1p(_SPLIT_SHARE * (schedule.lanes * schedule.chunks - 1))
    layers = max(1, stages.layers)
    few = min(layers, _MOST_OF_TWO_KINDS if stages.linear_layers else _MOST_LAYERS)
    schedule = replace(schedule, signalled=False)  # what signals gain more is not modelled
    serial = layer_program(_times(stages, SERIAL, layers), few, SERIAL)
    program = layer_program(_times(stages, schedule, layers), few, schedule)
    fast = simulate([program] * schedule.lanes, schedule, _HANDOFF_S).seconds
    slow = simulate([serial], SERIAL).seconds
    return math.log(fast / slow) if fast > 0 and slow > 0 else 0.0


def _times(stages: Stages, schedule: Schedule, layers: int) -> list[LayerTimes]:
    """Seconds of one lane in each layer; what is split or cut into chunks takes `_SPLIT_SHARE` more for each part."""

    def lane(seconds: float, chunks: int = 1) -> float:
        parts = schedule.lanes * chunks
        return seconds * (1 + _SPLIT_SHARE * (parts - 1)) / schedule.lanes / layers

    share = 1 / schedule.lanes / layers
    linear = len(stages.linear_layers)
    full_s = (stages.attention - stages.linear) / max(1, layers - linear) * layers
    full = LayerTimes(
        attn_core=lane(max(0.0, full_s)),
        experts=lane(stages.experts, schedule.chunks),
        dispatch=stages.dispatch * share,
        combine=stages.combine * share,
        attn_gather=stages.other * share,
    )
    other = replace(full, attn_core=lane(stages.linear / max(1, linear) * layers))
    return [other if layer in stages.linear_layers else full for layer in range(layers)]
