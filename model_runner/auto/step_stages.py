"""Where a step's time went: computing, or waiting for transfers. From plain times of its transfers, without a trace.

A rank's wait for a transfer contains the lateness of its peers, which overlap cannot hide. So the time that a transfer
takes on the link is its shortest wait over the ranks. The ranks exchange a `row` per step; the largest value of every
entry over the ranks, which one all-reduce gives, is what `Stages.of` reads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ubatch.ranks.transfer_times import Arrival

__all__ = ["ROW", "Stages", "row"]

_SLOTS = 24
"""Waits of each of the three kinds of transfers that are told apart; those of a deeper model share them."""
_KINDS = ("dispatch", "combine", "other")
ROW = 5 + len(_KINDS) * _SLOTS
"""Numbers per step that a rank tells the others."""


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
    def of(largest: Sequence[float], layers: int, linear_layers: Collection[int] = ()) -> Stages:
        """From the largest value over the ranks of each entry of their rows."""
        seconds, attention, experts, linear, travel, *waits = largest
        dispatch, combine, other = (0.0 - sum(waits[place : place + _SLOTS]) for place in range(0, len(waits), _SLOTS))
        here = tuple(sorted(layer for layer in linear_layers if layer < layers))
        return Stages(seconds, attention, experts, dispatch, combine, other, -travel, layers, linear, here)


def row(
    seconds: float,
    start: float,
    arrivals: Sequence[Arrival],
    *,
    shared_cores: bool,
    linear_layers: Collection[int] = (),
) -> tuple[list[float], int]:
    """What this rank tells the others of a step, `ROW` numbers, and the number of combines.

    Args:
        seconds: the step's time on this rank; 0 if it is not known.
        start: when it began, as `time.monotonic`.
        arrivals: its transfers, in the order of their waits.
        shared_cores: the transport's threads compute where the model does, so their CPU time is not hidden in lanes.
        linear_layers: see `Stages`. What follows the last layer counts for both kinds, by their numbers.
    """
    compute = {"attention": 0.0, "experts": 0.0, "linear": 0.0}
    waits = {kind: [0.0] * _SLOTS for kind in _KINDS}
    counts = dict.fromkeys(_KINDS, 0)
    before, travel = start, 0.0
    for each in arrivals:
        kind = next((kind for kind in _KINDS if each.name.startswith(kind)), "other")
        computed = max(0.0, each.launched - before)
        compute["experts" if kind == "combine" else "attention"] += computed
        if kind != "combine" and counts["combine"] in linear_layers:
            compute["linear"] += computed
        compute["experts"] += each.waited - each.launched  # a shared expert
        waited = max(0.0, each.arrived - each.waited - (each.cpu_s if shared_cores else 0.0))
        waits[kind][counts[kind] % _SLOTS] -= waited
        counts[kind] += 1
        travel += each.arrived - each.launched
        before = max(each.waited, each.arrived)
    rest = max(0.0, start + seconds - before)
    compute["attention"] += rest
    compute["linear"] += rest * len(linear_layers) / max(1, len(linear_layers), counts["combine"])
    told = [seconds, *compute.values(), -travel]
    return told + [value for kind in _KINDS for value in waits[kind]], counts["combine"]
