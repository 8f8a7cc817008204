"""A step's stages over all ranks, from the times of its transfers; and what the simulator expects of them."""

from __future__ import annotations

import math

import pytest

from model_runner.auto.step_stages import Stages, expected_log_ratio, row
from ubatch import SCHEDULES
from ubatch.ranks.waits import Arrival
from ubatch.schedules.vote import TOLD_WIDTH

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


def stages_of(*rows: tuple[int, ...]) -> Stages:
    found = Stages.of(rows)
    assert found is not None
    return found


def test_the_lateness_of_peers_is_no_time_on_the_link() -> None:
    rows = [row(45.0, 0.0, arrivals(late)) for late in (0.0, 1.5)]
    assert {len(each) for each in rows} == {TOLD_WIDTH}
    stages = stages_of(*rows)
    assert (stages.dispatch, stages.combine, stages.other) == pytest.approx((8.0, 8.0, 0.0))
    assert stages.experts == pytest.approx(12.0)
    assert stages.attention == pytest.approx(4.0 + 45 - 32)  # what follows the last combine, too
    assert stages.layers == LAYERS
    assert stages.waits == pytest.approx(16.0)


def test_the_transports_own_work_is_no_wait_on_cores_that_it_shares() -> None:
    one = [Arrival("dispatch", 1.0, 1.0, 3.0, cpu_s=1.5)]
    waits = [stages_of(row(4.0, 0.0, one, shared_cores=shared)).dispatch for shared in (False, True)]
    assert waits == pytest.approx([2.0, 0.5])


def test_a_shared_expert_between_launch_and_wait_is_compute() -> None:
    stages = stages_of(row(10.0, 0.0, [Arrival("combine", 2.0, 5.0, 6.0)]))
    assert (stages.combine, stages.experts, stages.attention) == pytest.approx((1.0, 5.0, 4.0))


def test_more_layers_than_slots_share_them() -> None:
    many = [Arrival("combine", float(i), float(i), i + 0.5) for i in range(100)]
    assert stages_of(row(100.0, 0.0, many)).combine == pytest.approx(50.0)


def test_the_time_of_a_step_is_unknown_if_one_rank_does_not_tell_it() -> None:
    known = row(4.0, 0.0, arrivals(0.0))
    assert Stages.of((known, ())) is Stages.of(()) is None
    assert stages_of(row(4.0), row(3.0)) == Stages(4.0)  # only the whole time is known, as on a GPU
    assert stages_of(row(4.0, 0.0, ())) == Stages(4.0, attention=4.0)  # nothing travelled, as on one rank


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
