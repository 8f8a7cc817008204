"""Every named schedule keeps what schedules promise (`schedule_checks`), and one entry is all that a new one takes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import schedule_checks
from repository import ROOT
from schedule_checks import CHECKS, real_order

from ubatch.errors import ConfigError
from ubatch.schedules.lane_program import layer_program
from ubatch.schedules.ring import interleave
from ubatch.schedules.schedule import SCHEDULES, Point, Schedule, get_schedule
from ubatch.schedules.simulator import Timeline, simulate


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_named_schedule(check: Callable[[str], None], name: str) -> None:
    check(name)


# ------------------------------------------------------------------------------------------- broken ones are noticed


class Moody(Schedule):
    """Hands on at a point or not, depending on how often it was asked."""

    asked = itertools.count()

    def active(self, point: str) -> bool:
        return super().active(point) and next(self.asked) % 7 > 0


class Partial(Schedule):
    """Its own mapping leaves out what it does."""

    def to_mapping(self) -> dict[str, object]:
        return {"lanes": self.lanes}


BROKEN = {
    "moody": (Moody("broken"), "the_order_is_foretold", AssertionError, None),
    "a subclass": (Moody("broken"), "all_lanes_pass_alike", ConfigError, "is a Moody"),
    "no peer": (Schedule("broken", lanes=1, recv="peer"), "all_lanes_pass_alike", ConfigError, "no peer is there"),  # type: ignore[arg-type]
    "half a mapping": (Partial("broken", lead=1), "settings_know_it", AssertionError, None),
    "another's name": (Schedule("serial"), "it_is_documented", AssertionError, None),
    "nobody's help": (Schedule("broken"), "it_is_documented", AssertionError, None),
}


@pytest.mark.parametrize(("schedule", "check", "error", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_schedule_is_noticed(
    monkeypatch: pytest.MonkeyPatch, schedule: Schedule, check: str, error: type[Exception], message: str | None
) -> None:
    monkeypatch.setitem(SCHEDULES, "broken", schedule)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        CHECKS[check]("broken")


def hasty(*args: Any) -> Timeline:
    line = simulate(*args)
    line.seconds /= 2
    return line


@pytest.mark.parametrize(
    ("check", "part", "instead"),
    [
        ("lane_0_leads", "real_order", lambda schedule: real_order(replace(schedule, lead=0))),
        ("all_lanes_pass_alike", "real_order", lambda schedule: real_order(schedule)[1:]),
        ("chunks_are_launched", "layer_program", lambda *args: layer_program(*args)[:-3]),
        ("the_time_lies_between_the_bounds", "simulate", hasty),
    ],
)
def test_a_runtime_or_a_simulator_that_is_broken_is_noticed(
    monkeypatch: pytest.MonkeyPatch, check: str, part: str, instead: Callable[..., Any]
) -> None:
    """It does not lead, stops early, does not wait for a transfer, or is faster than the work."""
    monkeypatch.setattr(schedule_checks, part, instead)
    with pytest.raises(AssertionError):
        CHECKS[check]("two_batch_decode")


# ---------------------------------------------------------------------------------------------------- one more of them

ONE_MORE = """
from ubatch.schedules import schedule
from ubatch.schedules.schedule import Point, Schedule

schedule.SCHEDULES["one_more"] = Schedule("one_more", lead=1, points_off=frozenset({Point.SELECT}))

import torch
from schedule_checks import CHECKS
from serving.workbench.bench.step_setting import StepOptions
from serving.workbench.planning import gates, plan
from wrapper_cases import Model, x_of
from ubatch import UBatchConfig, UBatchWrapper

for check in CHECKS.values():
    check("one_more")
model = Model()
wrapper = UBatchWrapper(model, UBatchConfig(schedule="one_more", verify="off", dbo_prefill_token_threshold=2))
x = x_of(6)
torch.testing.assert_close(wrapper(x), model(x))
assert wrapper.statistics().engaged == 1
wrapper.close()
assert StepOptions(schedule="one_more", model="tiny").schedule == "one_more"
assert "one_more" in plan.SCHEDULES and "one_more" in gates.SCHEDULES
"""


@pytest.mark.wide
@pytest.mark.long
def test_one_entry_is_all_that_a_new_schedule_takes() -> None:
    """Before anything else is imported, as if it stood in the file: settings, flags, runtime and simulator know it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ONE_MORE]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr


# ---------------------------------------------------------------------------------------------- what they were made for


def test_the_named_schedules_have_sglangs_stages() -> None:
    layer = [Point.ATTN_PREPARE, Point.SELECT, Point.DISPATCH, Point.COMBINE, Point.OUTPUT, Point.LAYER]
    for name, stages, lead in (("two_batch_decode", 5, 2), ("two_batch_prefill", 2, 0), ("mlp_shared_overlap", 2, 0)):
        schedule = get_schedule(name)
        program = [str(point) for point in layer * 7 if schedule.active(point)]
        order = interleave([program] * 2, lead=schedule.lead)
        assert (sum(lane == 1 for lane, _ in order), schedule.lead) == (7 * stages + 1, lead)
