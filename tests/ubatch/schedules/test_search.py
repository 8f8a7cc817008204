"""The schedule search finds the known best schedules, and the same as trying all of them, for layers of any kinds."""

import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import product
from statistics import mean
from typing import Any

import pytest
from layer_times import bound_of, scaled

from ubatch import ConfigError, Schedule, SharedExpert, get_schedule
from ubatch.schedules import Candidate, LayerTimes, Timeline, layer_program, search_schedules, simulate

pytestmark = pytest.mark.long

LAYERS = 60
Period = Sequence[LayerTimes]
"""The layers of a model, again and again."""


def whole(attention: float, experts: float, shared: float = 0.0) -> LayerTimes:
    """A layer whose communication is as long as its compute."""
    return LayerTimes(attn_core=attention, experts=experts, shared=shared, dispatch=0.5, combine=0.5)


def shares(period: Period) -> Callable[..., list[LayerTimes]]:
    """Each lane's share of the work, without any cost of splitting."""
    return lambda lanes, *_: [scaled(own, 1 / lanes) for own in period]


def best_of(times: Callable[..., Any], layers: int = LAYERS, **limits: Any) -> Candidate:
    return search_schedules(times, layers, **limits)[0]


def line_of(period: Period, layers: int, schedule: Schedule) -> Timeline:
    return simulate([layer_program(shares(period)(schedule.lanes), layers, schedule)] * schedule.lanes, schedule)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("times", "lanes", "chunks", "efficiency", "shape"),
    [
        (whole(0.3, 0.7), 2, 1, 0.83, (2, 1)),
        (whole(0.3, 0.7), 2, 2, 0.99, (2, 2)),
        (whole(0.7, 0.3), 2, 1, 0.83, (2, 1)),
        (whole(0.7, 0.3), 3, 1, 0.96, (3, 1)),
        (whole(0.4, 0.4, 0.2), 2, 1, 0.95, (2, 1)),
        (whole(0.4, 0.4, 0.2), 2, 2, 0.99, (2, 2)),
    ],
)
def test_golden_facts(times: LayerTimes, lanes: int, chunks: int, efficiency: float, shape: tuple[int, int]) -> None:
    found = best_of(shares([times]), max_lanes=lanes, max_chunks=chunks)
    assert found.efficiency == pytest.approx(efficiency, abs=0.012)
    assert (found.schedule.lanes, found.schedule.chunks) == shape
    if not times.shared:  # which one lane hides, too
        assert found.speedup == pytest.approx(2 * found.efficiency, rel=0.02)


ALIKE = [LayerTimes(attn_prepare=0.2, attn_core=0.25, experts=0.45, shared=0.2, dispatch=0.3, combine=0.6)]


def at_random(seed: int, layers: int, *, repeats: bool) -> Period:
    draw = random.Random(seed)
    kinds = [LayerTimes(*(draw.uniform(0.1, 1) for _ in range(4)), attn_prepare=draw.uniform(0, 0.3)) for _ in range(2)]
    return [draw.choice(kinds) for _ in range(draw.randint(2, 5) if repeats else layers)]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("period", "layers", "chunks"),
    [
        (ALIKE, 23, (1, 2)),
        (at_random(0, 31, repeats=False), 31, (1,)),
        (at_random(1, 38, repeats=True), 38, (1,)),
        (at_random(2, 17, repeats=True), 17, (1,)),
    ],
    ids=["alike", "no period", "a period", "part of one"],
)
def test_what_it_says_is_what_the_simulator_says_and_nothing_better_is_overlooked(
    period: Period, layers: int, chunks: tuple[int, ...]
) -> None:
    """What is extrapolated is right. Schedules are tried one by one, and whole, with points of all kinds off."""
    found = search_schedules(shares(period), layers, max_lanes=2, max_chunks=max(chunks), keep=5)
    for each in found:
        line = line_of(period, layers, each.schedule)
        assert (each.seconds, each.bound_s) == (line.seconds, pytest.approx(bound_of(line)))
    off = [frozenset(points) for points in (("layer",), ("layer", "select", "output"), ("attn_prepare",), ("select",))]
    for points, lead, count, place in product(off, range(3), chunks, SharedExpert):
        one = Schedule("one", chunks=count, lead=lead, points_off=points, shared_expert=place)
        assert line_of(period, layers, one).seconds >= found[0].seconds * (1 - 5e-3), one.describe()


@pytest.mark.slow
def test_what_splitting_costs_decides() -> None:
    """Where lanes double the compute nothing hides that, and one lane in chunks is best."""
    times = whole(0.5, 0.5)

    def doubled(lanes: int, chunks: int, chunk_dispatch: bool) -> LayerTimes:
        own = scaled(times, 1 / lanes)
        return own if lanes == 1 else replace(own, attn_core=2 * own.attn_core, experts=2 * own.experts)

    found = best_of(doubled)
    # Half of the experts runs during the dispatch, half during the combine; the link is busy whenever they run.
    assert (found.schedule.lanes, found.schedule.chunks, found.speedup) == (1, 2, pytest.approx(2 / 1.5))
    alone = best_of(shares([replace(times, dispatch=0.0, combine=0.0)]))
    assert (alone.schedule.lanes, alone.schedule.chunks, alone.speedup) == (1, 1, 1.0)


def test_dear_hand_offs_leave_fewer_lanes() -> None:
    cheap, dear = (best_of(shares([whole(0.7, 0.3)]), max_chunks=1, handoff_s=cost) for cost in (0.0, 0.05))
    assert cheap.schedule.lanes > dear.schedule.lanes


def test_extra_bytes_of_chunks_count() -> None:
    def heavier(lanes: int, chunks: int, chunk_dispatch: bool) -> LayerTimes:
        own, factor = scaled(whole(0.3, 0.7), 1 / lanes), 1.48 if chunks > 1 else 1.0
        return replace(own, combine=factor * own.combine, dispatch=own.dispatch * (factor if chunk_dispatch else 1.0))

    found = best_of(heavier, max_lanes=2)
    assert (found.schedule.lanes, found.schedule.chunks) == (2, 1)


def merged(period: Period) -> list[LayerTimes]:
    """What one kind of layer would say: the mean."""
    return [LayerTimes(**{each.name: mean(getattr(own, each.name) for own in period) for each in fields(LayerTimes)})]


def test_layers_of_two_kinds_have_times_of_their_own() -> None:
    """The work is the same, but a layer whose transfers nothing covers waits for them, whatever its neighbours do."""
    linear = LayerTimes(attn_prepare=0.2, attn_core=0.1, experts=0.5, dispatch=0.4, combine=0.4)
    period, schedule = [linear] * 3 + [replace(linear, attn_core=1.9)], get_schedule("two_batch_prefill")
    own, mean_of = (line_of(times, 48, schedule) for times in (period, merged(period)))
    assert own.compute_s == pytest.approx(mean_of.compute_s)
    assert own.communication_s == pytest.approx(mean_of.communication_s)
    assert own.seconds > 1.05 * mean_of.seconds
    # What is best for the mean layer is not best for the layers that there are.
    linear = LayerTimes(attn_prepare=0.4, attn_core=0.4, experts=0.4, dispatch=1.1, combine=0.3)
    period = [linear] * 3 + [replace(linear, attn_core=2.0)]
    by_mean, by_kind = (
        best_of(shares(each), 24, max_lanes=2, max_chunks=1, keep=1) for each in (merged(period), period)
    )
    assert line_of(period, 24, by_mean.schedule).seconds > 1.02 * by_kind.seconds


def test_wrong_numbers_are_refused() -> None:
    for refused, message in (
        (lambda: search_schedules(lambda *_: whole(1, 1), 0), "layers must be at least 1, not 0"),
        (lambda: whole(1.0, -1.0), r"LayerTimes.experts must be at least 0 seconds, not -1"),
        (lambda: layer_program((), 2, get_schedule("serial")), "stage times of no layer"),
    ):
        with pytest.raises(ConfigError, match=message):
            refused()
