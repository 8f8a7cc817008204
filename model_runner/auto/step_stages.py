"""Where a step's time went: computing, or waiting for transfers. From plain times of its transfers, without a trace.

A rank's wait for a transfer contains the lateness of its peers, which overlap cannot hide. So the time that a transfer
takes on the link is its shortest wait over the ranks. Every rank tells the others a `row` with its next vote.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from ubatch import Schedule
from ubatch.ranks import Arrival
from ubatch.schedules import SERIAL, LayerTimes, Op, layer_program, simulate

_SLOTS = 8
"""Waits of each of the three kinds of transfers that are told apart; those of more layers share them."""
_KINDS = ("dispatch", "combine", "other")
_NS = 1e9  # a row is of whole nanoseconds
_SPLIT_SHARE = 0.15
"""Share of a stage's time that every lane takes again, however few tokens it has, until steps tell: on a CPU the
matrix products of half a batch take some 12 to 25% longer in sum."""
_HANDOFF_S = 30e-6
_MOST_LAYERS = 3  # more repeat what these show


@dataclass(frozen=True)
class Stages:
    """A step, in seconds.

    Attributes:
        seconds: the whole step, on its slowest rank.
        attention, experts: compute before a layer's dispatch, and between dispatch and combine, on the slowest rank.
        dispatch, combine, other: waits for transfers that every rank had; `other` is that of tensor parallelism.
        layers: number of combines.
    """

    seconds: float
    attention: float = 0.0
    experts: float = 0.0
    dispatch: float = 0.0
    combine: float = 0.0
    other: float = 0.0
    layers: int = 0

    @property
    def waits(self) -> float:
        """All waits together: what overlap can hide at most."""
        return self.dispatch + self.combine + self.other

    def toward(self, later: Stages, share: float) -> Stages:
        """From these stages a share of the way to those of a later step."""
        both = zip(astuple(self), astuple(later), strict=True)
        return replace(Stages(*(mine + share * (its - mine) for mine, its in both)), layers=later.layers)

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> Stages | None:
        """From the `row` of every rank; None if the time of one is not known."""
        if not rows or not all(rows):
            return None
        entries = list(zip(*rows, strict=True))
        layers, *slowest = (max(values) for values in entries[:4])
        waits = [min(values) / _NS for values in entries[4:]]
        seconds, attention, experts = (value / _NS for value in slowest)
        dispatch, combine, other = (sum(waits[place : place + _SLOTS]) for place in range(0, len(waits), _SLOTS))
        return Stages(seconds, attention, experts, dispatch, combine, other, layers)


def row(
    seconds: float, start: float = 0.0, arrivals: Sequence[Arrival] | None = None, *, shared_cores: bool = False
) -> tuple[int, ...]:
    """What this rank tells the others of a step: 28 integers.

    Args:
        seconds: the step's time on this rank.
        start: when it began, as `time.monotonic`.
        arrivals: its transfers, in the order of their waits; None if only the whole time is known.
        shared_cores: the transport's threads compute where the model does, so their CPU time is not hidden in lanes.
    """
    waits = {kind: [0.0] * _SLOTS for kind in _KINDS}
    counts = dict.fromkeys(_KINDS, 0)
    attention, experts, before = 0.0, 0.0, start
    for each in arrivals or ():
        kind = next((kind for kind in _KINDS if each.name.startswith(kind)), "other")
        computed = max(0.0, each.launched - before)
        if kind == "combine":
            experts += computed
        else:
            attention += computed
        experts += each.waited - each.launched  # a shared expert
        computing_s = each.cpu_s if shared_cores else 0.0
        waits[kind][counts[kind] % _SLOTS] += max(0.0, each.arrived - each.waited - computing_s)
        counts[kind] += 1
        before = max(each.waited, each.arrived)
    if arrivals is not None:
        attention += max(0.0, start + seconds - before)
    slots = (value for kind in _KINDS for value in waits[kind])
    told = (round(value * _NS) for value in (seconds, attention, experts, *slots))
    return counts["combine"], *told


def expected_log_ratio(stages: Stages, schedule: Schedule) -> float:
    """log(time under `schedule` / serial time) of a step whose serial stages are given.

    Without transfers there is nothing to hide, and splitting costs; the result is then positive.
    """
    schedule = replace(schedule, signalled=False)  # what signals gain more is not modelled
    serial, program = (_program(stages, each) for each in (SERIAL, schedule))
    fast = simulate([program] * schedule.lanes, schedule, _HANDOFF_S).seconds
    slow = simulate([serial], SERIAL).seconds
    return math.log(fast / slow) if fast > 0 and slow > 0 else 0.0


def _program(stages: Stages, schedule: Schedule) -> list[Op]:
    """One lane; what is split or cut into chunks takes `_SPLIT_SHARE` more for each part."""
    share = 1 / schedule.lanes / max(1, stages.layers)

    def compute(seconds: float, chunks: int = 1) -> float:
        return seconds * share * (1 + _SPLIT_SHARE * (schedule.lanes * chunks - 1))

    layer = LayerTimes(
        attn_core=compute(stages.attention),
        experts=compute(stages.experts, schedule.chunks),
        dispatch=stages.dispatch * share,
        combine=stages.combine * share,
        attn_gather=stages.other * share,
    )
    return layer_program(layer, min(max(1, stages.layers), _MOST_LAYERS), schedule)
