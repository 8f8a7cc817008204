"""Where a step's time went: computing, or waiting for transfers. From plain times of its transfers, without a trace.

A rank's wait for a transfer contains the lateness of its peers, which overlap cannot hide. So the time that a transfer
takes on the link is its shortest wait over the ranks. Every rank tells the others a `row` with its next vote.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ubatch.ranks.transfer_times import Arrival

__all__ = ["Stages", "row"]

_SLOTS = 8
"""Waits of each of the three kinds of transfers that are told apart; those of more layers share them."""
_KINDS = ("dispatch", "combine", "other")
_NS = 1e9
"""A row is of whole nanoseconds."""


@dataclass(frozen=True)
class Stages:
    """A step, in seconds.

    Attributes:
        seconds: the whole step, on its slowest rank.
        attention, experts: compute before a layer's dispatch, and between dispatch and combine, on the slowest rank.
        dispatch, combine, other: waits for transfers that every rank had; `other` is that of tensor parallelism.
        travel: sum of all transfers from launch to arrival, on the rank where it is smallest. In an overlapped step
            it tells a change of the link.
        layers: number of combines.
        linear: the part of `attention` in layers with linear attention.
        linear_layers: places of these among the layers; empty if there are none.
    """

    seconds: float
    attention: float = 0.0
    experts: float = 0.0
    dispatch: float = 0.0
    combine: float = 0.0
    other: float = 0.0
    travel: float = 0.0
    layers: int = 0
    linear: float = 0.0
    linear_layers: tuple[int, ...] = ()

    @property
    def waits(self) -> float:
        """All waits together: what overlap can hide at most."""
        return self.dispatch + self.combine + self.other

    @staticmethod
    def of(rows: Sequence[Sequence[int]], linear_layers: Collection[int] = ()) -> Stages | None:
        """From the `row` of every rank; None if the time of one is not known."""
        if not rows or not all(rows):
            return None
        entries = list(zip(*rows, strict=True))
        layers, *slowest = (max(values) for values in entries[:5])
        travel, *waits = (min(values) / _NS for values in entries[5 : 6 + len(_KINDS) * _SLOTS])
        seconds, attention, experts, linear = (value / _NS for value in slowest)
        dispatch, combine, other = (sum(waits[place : place + _SLOTS]) for place in range(0, len(waits), _SLOTS))
        here = tuple(sorted(layer for layer in linear_layers if layer < layers))
        return Stages(seconds, attention, experts, dispatch, combine, other, travel, layers, linear, here)


def row(
    seconds: float,
    start: float = 0.0,
    arrivals: Sequence[Arrival] | None = None,
    *,
    shared_cores: bool = False,
    linear_layers: Collection[int] = (),
) -> tuple[int, ...]:
    """What this rank tells the others of a step: 30 integers.

    Args:
        seconds: the step's time on this rank.
        start: when it began, as `time.monotonic`.
        arrivals: its transfers, in the order of their waits; None if only the whole time is known.
        shared_cores: the transport's threads compute where the model does, so their CPU time is not hidden in lanes.
        linear_layers: see `Stages`. What follows the last layer counts for both kinds, by their numbers.
    """
    waits = {kind: [0.0] * _SLOTS for kind in _KINDS}
    counts = dict.fromkeys(_KINDS, 0)
    attention = experts = linear = travel = 0.0
    before = start
    for each in arrivals or ():
        kind = next((kind for kind in _KINDS if each.name.startswith(kind)), "other")
        computed = max(0.0, each.launched - before)
        if kind == "combine":
            experts += computed
        else:
            attention += computed
            linear += computed if counts["combine"] in linear_layers else 0.0
        experts += each.waited - each.launched  # a shared expert
        waits[kind][counts[kind] % _SLOTS] += max(
            0.0, each.arrived - each.waited - (each.cpu_s if shared_cores else 0.0)
        )
        counts[kind] += 1
        travel += each.arrived - each.launched
        before = max(each.waited, each.arrived)
    if arrivals is not None:
        rest = max(0.0, start + seconds - before)
        attention += rest
        linear += rest * len(linear_layers) / max(1, len(linear_layers), counts["combine"])
    slots = (value for kind in _KINDS for value in waits[kind])
    told = (round(value * _NS) for value in (seconds, attention, experts, linear, travel, *slots))
    return counts["combine"], *told
