"""A step's stages over all ranks, from the times of its transfers; and what the simulator expects of them."""

from __future__ import annotations

import math

import pytest

from model_runner.auto.overlap_gain import expected_log_ratio
from model_runner.auto.step_stages import ROW, Stages, row
from ubatch import SCHEDULES
from ubatch.ranks.transfer_times import Arrival

LAYERS = 4


def arrivals(late: float, *, link: float = 2.0, attention: float = 1.0, experts: float = 3.0) -> list[Arrival]:
    """A serial step that begins at 0: its peers are `late` in every dispatch."""
    found, now = [], 0.0
    for _ in range(LAYERS):
        for name, compute, behind in (("dispatch", attention, late), ("combine", experts, 0.0)):
            launched = now + compute
            now = launched + link + behind
            found.append(Arrival(name, launched, launched, now))
    return found


def largest(*rows: tuple[list[float], int]) -> list[float]:
    return [max(values) for values in zip(*(each for each, _ in rows), strict=True)]


def test_the_lateness_of_peers_is_no_time_on_the_link() -> None:
    rows = [row(45.0, 0.0, arrivals(late), shared_cores=False) for late in (0.0, 1.5)]
    assert {len(each) for each, _ in rows} == {ROW}
    stages = Stages.of(largest(*rows), rows[0][1])
    assert (stages.dispatch, stages.combine, stages.other) == pytest.approx((8.0, 8.0, 0.0))
    assert stages.experts == pytest.approx(12.0)
    assert stages.attention == pytest.approx(4.0 + 45 - 32)  # what follows the last combine, too
    assert stages.layers == LAYERS
    assert stages.travel == pytest.approx(16.0)
    assert stages.waits == pytest.approx(16.0)


def test_the_transports_own_work_is_no_wait_on_cores_that_it_shares() -> None:
    one = [Arrival("dispatch", 1.0, 1.0, 3.0, cpu_s=1.5)]
    waits = [Stages.of(row(4.0, 0.0, one, shared_cores=shared)[0], 1).dispatch for shared in (False, True)]
    assert waits == pytest.approx([2.0, 0.5])


def test_a_shared_expert_between_launch_and_wait_is_compute() -> None:
    stages = Stages.of(row(10.0, 0.0, [Arrival("combine", 2.0, 5.0, 6.0)], shared_cores=False)[0], 1)
    assert (stages.combine, stages.experts, stages.attention) == pytest.approx((1.0, 5.0, 4.0))


def test_more_layers_than_slots_share_them() -> None:
    many = [Arrival("combine", float(i), float(i), i + 0.5) for i in range(100)]
    assert Stages.of(row(100.0, 0.0, many, shared_cores=False)[0], 100).combine == pytest.approx(50.0)


@pytest.mark.parametrize("name", ["mlp_shared_overlap", "two_batch_decode", "single_batch", "single_batch_signalled"])
def test_what_the_simulator_expects(name: str) -> None:
    schedule = SCHEDULES[name]
    nothing = Stages(10.0, 4.0, 6.0, layers=8)
    balanced = Stages(20.0, 4.0, 6.0, 5.0, 5.0, layers=8)
    if schedule.lanes > 1 or schedule.chunks > 1:
        assert expected_log_ratio(nothing, schedule) > 0.05  # splitting costs
    gain = math.exp(-expected_log_ratio(balanced, schedule))
    assert (1.1 if schedule.lanes > 1 else 0.9) < gain < 2.0
    assert expected_log_ratio(Stages(0.0), schedule) == 0.0
