"""Layers of several kinds, as where some have linear attention, are simulated and searched with times of their own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from statistics import mean

import pytest
from layer_times import bound_of, scaled

from ubatch.errors import ConfigError
from ubatch.schedules.layer_program import LayerTimes, layer_program
from ubatch.schedules.schedule import SCHEDULES, Schedule
from ubatch.schedules.search import search_schedules
from ubatch.schedules.simulate import Timeline, simulate

FULL = LayerTimes(attn_prepare=0.2, attn_core=1.9, experts=0.5, dispatch=0.4, combine=0.4)
LINEAR = replace(FULL, attn_core=0.1)
PERIOD = (LINEAR, LINEAR, LINEAR, FULL)


def lanes_of(times: LayerTimes | Sequence[LayerTimes], layers: int, schedule: Schedule) -> Timeline:
    return simulate([layer_program(times, layers, schedule)] * schedule.lanes, schedule)


def merged(times: Sequence[LayerTimes]) -> LayerTimes:
    """What one kind of layer would say: the mean."""
    return LayerTimes(**{each.name: mean(getattr(own, each.name) for own in times) for each in fields(LayerTimes)})


def halves(times: Sequence[LayerTimes], lanes: int) -> list[LayerTimes]:
    return [scaled(own, 1 / lanes) for own in times]


def test_the_mean_of_two_kinds_hides_what_a_lane_waits_for() -> None:
    """The work is the same, but a layer whose transfers nothing covers waits for them, whatever its neighbours do."""
    schedule = SCHEDULES["two_batch_prefill"]
    own, mean_of = (lanes_of(times, 48, schedule) for times in (halves(PERIOD, 2), scaled(merged(PERIOD), 0.5)))
    assert own.compute_s == pytest.approx(mean_of.compute_s)
    assert own.communication_s == pytest.approx(mean_of.communication_s)
    assert own.seconds > 1.05 * mean_of.seconds
    with pytest.raises(ConfigError, match="stage times of no layer"):
        layer_program((), 2, schedule)


@pytest.mark.parametrize("seed", range(3))
def test_the_search_is_the_simulators_for_any_order_of_kinds(seed: int) -> None:
    """Whole periods or part of one, or no period at all: what is extrapolated is right, nothing overlooked."""
    draw = random.Random(seed)
    kinds = [LayerTimes(*(draw.uniform(0.1, 1) for _ in range(4)), attn_prepare=draw.uniform(0, 0.3)) for _ in range(2)]
    pattern = [draw.choice(kinds) for _ in range(draw.randint(2, 5))]
    layers = draw.randint(14, 40)
    if seed == 0:
        pattern = [draw.choice(kinds) for _ in range(layers)]
    found = search_schedules(lambda lanes, *_: halves(pattern, lanes), layers, max_lanes=2, max_chunks=1, keep=5)
    for each in found:
        line = lanes_of(halves(pattern, each.schedule.lanes), layers, each.schedule)
        assert each.seconds == line.seconds
        assert each.bound_s == pytest.approx(bound_of(line))
    for points in (("layer",), ("layer", "select", "output"), ("attn_prepare",), ("select", "output")):
        for lead in range(4):
            one = Schedule("one", lead=lead, points_off=frozenset(points))
            assert lanes_of(halves(pattern, 2), layers, one).seconds >= found[0].seconds * (1 - 5e-3), one.describe()


def test_the_search_chooses_by_kind() -> None:
    """What is best for the mean layer is not best for the layers that there are."""
    linear = LayerTimes(attn_prepare=0.4, attn_core=0.4, experts=0.4, dispatch=1.1, combine=0.3)
    period = (linear, linear, linear, replace(linear, attn_core=2.0))
    by_mean, by_kind = (
        search_schedules(times, 24, max_lanes=2, max_chunks=1, keep=1)[0]
        for times in (lambda lanes, *_: scaled(merged(period), 1 / lanes), lambda lanes, *_: halves(period, lanes))
    )
    own = lanes_of(halves(period, by_mean.schedule.lanes), 24, by_mean.schedule)
    assert own.seconds > 1.02 * by_kind.seconds
