"""The best schedule for given stage times: all possible schedules, compared in the simulator.

    lanes x chunks (of combine, or of dispatch too) x lead x place of the shared expert x points that are active

The space has some thousands of schedules. Those of equal lanes and chunks have the same work, so none of them can be
faster than its bound; groups are tried in the order of their bounds, and a group that cannot be among the best is
skipped. Layers repeat, one kind after the other: a few are simulated, the rest is extrapolated from their last periods,
and only the best schedules are simulated in full. Layers that do not repeat are all simulated.

This module imports neither torch nor threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from ubatch.errors import ConfigError
from ubatch.schedules.lane_program import LayerTimes, layer_program, times_of_layers
from ubatch.schedules.schedule import SERIAL, Point, Schedule, SharedExpert
from ubatch.schedules.simulator import simulate

TimesOf = Callable[[int, int, bool], LayerTimes | Sequence[LayerTimes]]
"""(lanes, chunks, dispatch in chunks) -> seconds that one lane spends in one layer; see `layer_program`."""

_OPTIONAL_POINTS = (Point.ATTN_PREPARE, Point.SELECT, Point.OUTPUT, Point.LAYER)
_SHARED_ATTENTION = (Point.ATTN_GATHER, Point.ATTN_SCATTER)
"""Points named like their times in `LayerTimes`; if the time is 0, no lane passes the point."""
_MAX_LEAD = 4
_WARM_UP = 4
"""Layers until the time line is periodic; its period is that of the layers, or two layers if all are alike."""
_TIE = 1e-3
"""If the times of two schedules differ by less than this share, the simpler one is preferred."""


@dataclass(frozen=True)
class Candidate:
    """A schedule and its simulated times.

    Attributes:
        schedule: can be run after it gets a name.
        seconds: time of all layers.
        bound_s: no schedule with as many lanes and chunks can be faster: the greater of compute and communication.
        serial_s: one lane, one chunk, for comparison.
    """

    schedule: Schedule
    seconds: float
    bound_s: float
    serial_s: float

    @property
    def speedup(self) -> float:
        """Speed-up over the serial schedule."""
        return self.serial_s / self.seconds if self.seconds else 1.0

    @property
    def efficiency(self) -> float:
        """`bound_s / seconds`, 1.0 at best."""
        return self.bound_s / self.seconds if self.seconds else 1.0


def search_schedules(
    times: TimesOf,
    layers: int,
    *,
    max_lanes: int = 4,
    max_chunks: int = 4,
    combine_chunks: bool = True,
    handoff_s: float = 0.0,
    keep: int = 10,
) -> list[Candidate]:
    """The best schedules, best first; of those that are equally good, the simplest first.

    Args:
        times: stage and transfer times, measured or from a table.
        max_lanes, max_chunks: largest numbers to try.
        combine_chunks: whether to try schedules whose chunks share one dispatch, which not every transport supports.
        handoff_s: seconds that a hand-off of the baton costs.

    Raises:
        ConfigError: a limit is below 1.
    """
    for name, value in (("layers", layers), ("max_lanes", max_lanes), ("max_chunks", max_chunks), ("keep", keep)):
        if value < 1:
            raise ConfigError(f"schedule search: {name} must be at least 1, not {value}.")
    serial_s = _seconds(SERIAL, times(1, 1, True), layers, handoff_s)
    groups = sorted(_groups(times, layers, max_lanes, max_chunks, combine_chunks), key=lambda group: group[0])
    best: list[Candidate] = []
    for bound_s, base, own in groups:
        if len(best) == keep and bound_s >= best[-1].seconds:
            break
        few, period = _repeating(own)
        for schedule in _variants(base, own):
            best.append(Candidate(schedule, _estimate(schedule, own, few, period, handoff_s), bound_s, serial_s))
        best = _sorted(best)[:keep]

    def exact(schedule: Schedule) -> float:
        of_lane = times(schedule.lanes, schedule.chunks, schedule.chunk_dispatch)
        return _seconds(schedule, of_lane, layers, handoff_s)

    return _sorted([replace(found, seconds=exact(found.schedule)) for found in best])


def _groups(
    times: TimesOf, layers: int, max_lanes: int, max_chunks: int, combine_chunks: bool
) -> Iterator[tuple[float, Schedule, Sequence[LayerTimes]]]:
    """Schedules of the same work: their lower bound for all layers and lanes, one of them, and the times of one lane in
    each layer."""
    for lanes in range(1, max_lanes + 1):
        for chunks in range(1, max_chunks + 1):
            for chunk_dispatch in (True, False) if chunks > 1 and combine_chunks else (True,):
                own = times_of_layers(times(lanes, chunks, chunk_dispatch), layers)
                base = Schedule(f"{lanes}x{chunks}", lanes=lanes, chunks=chunks, chunk_dispatch=chunk_dispatch)
                bound = lanes * max(sum(each.compute_s for each in own), sum(each.communication_s for each in own))
                yield bound, base, own


def _repeating(times: Sequence[LayerTimes]) -> tuple[int, int]:
    """How many layers to simulate, and how many more of them follow again and again until all layers are through."""
    layers = len(times)
    every = next(p for p in range(1, layers + 1) if all(a == b for a, b in zip(times, times[p:], strict=False)))
    period = max(2, every)
    few = _WARM_UP + period
    return (few + (layers - few) % period, period) if layers > few else (layers, period)


def _variants(base: Schedule, times: Sequence[LayerTimes]) -> Iterator[Schedule]:
    """Variants with a different time line: with one lane the points do not matter, without a shared expert its place
    does not."""
    places = tuple(SharedExpert) if any(each.shared for each in times) else (base.shared_expert,)
    passed = [point for point in _SHARED_ATTENTION if any(getattr(each, point) for each in times)]
    optional = (*_OPTIONAL_POINTS, *passed)
    most_active, most_lead = (len(optional), _MAX_LEAD) if base.lanes > 1 else (0, 0)
    active = [points for count in range(most_active + 1) for points in combinations(optional, count)]
    for points, lead, place in product(active, range(most_lead + 1), places):
        yield replace(base, points_off=frozenset(optional) - frozenset(points), lead=lead, shared_expert=place)


def _seconds(schedule: Schedule, times: LayerTimes | Sequence[LayerTimes], layers: int, handoff_s: float) -> float:
    return simulate([layer_program(times, layers, schedule)] * schedule.lanes, schedule, handoff_s).seconds


def _estimate(schedule: Schedule, times: Sequence[LayerTimes], few: int, period: int, handoff_s: float) -> float:
    """Seconds of all layers, extrapolated from a few, of which the last ones repeat (`_repeating`); exact if the model
    has no more than those."""
    seconds = _seconds(schedule, times, few, handoff_s)
    periods = (len(times) - few) // period
    return seconds + (periods * (seconds - _seconds(schedule, times, few - period, handoff_s)) if periods else 0.0)


def _sorted(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Fastest first; schedules that tie with the fastest of a group are sorted by simplicity."""
    waiting = sorted(candidates, key=lambda each: each.seconds)
    ordered: list[Candidate] = []
    while waiting:
        limit = waiting[0].seconds * (1 + _TIE)
        tied = [each for each in waiting if each.seconds <= limit]
        ordered += sorted(tied, key=lambda each: _complexity(each.schedule))
        waiting = waiting[len(tied) :]
    return ordered


def _complexity(schedule: Schedule) -> tuple[int, ...]:
    """Sort key: features that cost time on a real machine, the most expensive first."""
    return (
        schedule.lanes * schedule.chunks,
        schedule.lanes,
        -len(schedule.points_off),
        schedule.lead,
        int(schedule.chunk_dispatch),
        list(SharedExpert).index(schedule.shared_expert),
    )
