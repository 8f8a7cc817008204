"""The schedule search finds the known best schedules, and the same as trying all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from layer_times import bound_of, scaled

from ubatch.errors import ConfigError
from ubatch.schedules.layer_program import LayerTimes, layer_program
from ubatch.schedules.schedule import Schedule, SharedExpert
from ubatch.schedules.search import Candidate, search_schedules
from ubatch.schedules.simulate import simulate

pytestmark = pytest.mark.long

LAYERS = 100


def whole(attention: float, experts: float, shared: float = 0.0) -> LayerTimes:
    """A layer whose communication is as long as its compute."""
    return LayerTimes(attn_core=attention, experts=experts, shared=shared, dispatch=0.5, combine=0.5)


def best_of(times: LayerTimes, *, lanes: int, chunks: int) -> Candidate:
    found = search_schedules(lambda n, *_: scaled(times, 1 / n), LAYERS, max_lanes=lanes, max_chunks=chunks)
    return found[0]


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
    found = best_of(times, lanes=lanes, chunks=chunks)
    assert found.efficiency == pytest.approx(efficiency, abs=0.012)
    assert (found.schedule.lanes, found.schedule.chunks) == shape
    if not times.shared:  # which one lane hides, too
        assert found.speedup == pytest.approx(2 * found.efficiency, rel=0.02)


def test_what_it_says_is_what_the_simulator_says() -> None:
    times = LayerTimes(attn_prepare=0.11, attn_core=0.3, experts=0.5, shared=0.13, dispatch=0.35, combine=0.62)
    for found in search_schedules(lambda n, *_: scaled(times, 1 / n), 9, max_lanes=2, max_chunks=2):
        program = layer_program(scaled(times, 1 / found.schedule.lanes), 9, found.schedule)
        line = simulate([program] * found.schedule.lanes, found.schedule)
        assert found.seconds == line.seconds
        assert found.bound_s == pytest.approx(bound_of(line))


def test_nothing_better_is_overlooked() -> None:
    """Against two-lane schedules tried one by one, whole: among them every point that may be switched off."""
    times = LayerTimes(attn_prepare=0.2, attn_core=0.25, experts=0.45, shared=0.2, dispatch=0.3, combine=0.6)
    found = search_schedules(lambda n, *_: scaled(times, 1 / n), 23, max_lanes=2, max_chunks=2)
    for points in (frozenset({"layer"}), frozenset({"layer", "select", "output"}), frozenset({"attn_prepare"})):
        for lead in range(3):
            for chunks in (1, 2):
                for place in SharedExpert:
                    one = Schedule("one", chunks=chunks, lead=lead, points_off=points, shared_expert=place)
                    line = simulate([layer_program(scaled(times, 0.5), 23, one)] * 2, one)
                    assert line.seconds >= found[0].seconds * (1 - 2e-3), one.describe()


@pytest.mark.slow
def test_what_splitting_costs_decides() -> None:
    """Where lanes double the compute nothing hides that, and one lane in chunks is best."""
    times = whole(0.5, 0.5)

    def doubled(lanes: int, chunks: int, chunk_dispatch: bool) -> LayerTimes:
        own = scaled(times, 1 / lanes)
        return own if lanes == 1 else replace(own, attn_core=2 * own.attn_core, experts=2 * own.experts)

    found = search_schedules(doubled, LAYERS)[0]
    # Half of the experts runs during the dispatch, half during the combine; the link is busy whenever they run.
    assert (found.schedule.lanes, found.schedule.chunks) == (1, 2)
    assert found.speedup == pytest.approx(2 / 1.5)
    alone = search_schedules(lambda n, *_: replace(scaled(times, 1 / n), dispatch=0.0, combine=0.0), LAYERS)[0]
    assert (alone.schedule.lanes, alone.schedule.chunks, alone.speedup) == (1, 1, 1.0)


def test_dear_hand_offs_leave_fewer_lanes() -> None:
    times = whole(0.7, 0.3)
    cheap, dear = (
        search_schedules(lambda n, *_: scaled(times, 1 / n), LAYERS, max_chunks=1, handoff_s=cost)[0].schedule.lanes
        for cost in (0.0, 0.05)
    )
    assert cheap > dear


def test_extra_bytes_of_chunks_count() -> None:
    times = whole(0.3, 0.7)

    def heavier(lanes: int, chunks: int, chunk_dispatch: bool) -> LayerTimes:
        own, factor = scaled(times, 1 / lanes), 1.48 if chunks > 1 else 1.0
        return replace(own, combine=factor * own.combine, dispatch=own.dispatch * (factor if chunk_dispatch else 1.0))

    found = search_schedules(heavier, LAYERS, max_lanes=2)[0]
    assert (found.schedule.lanes, found.schedule.chunks) == (2, 1)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers must be at least 1, not 0"):
        search_schedules(lambda *_: whole(1, 1), 0)
    with pytest.raises(ConfigError, match=r"LayerTimes.experts must be at least 0 seconds, not -1"):
        whole(1.0, -1.0)
