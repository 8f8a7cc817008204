"""Every named schedule keeps what schedules promise (`schedule_checks`), and one entry is all that a new one takes.

And the baton's rules as a pure table: which lane runs next, and the resulting interleaving.
"""

import itertools
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import schedule_checks
from hypothesis import given
from hypothesis import strategies as st
from repository import ROOT
from schedule_checks import CHECKS, real_order

from ubatch import SCHEDULES, ConfigError, Point, Schedule, get_schedule
from ubatch.schedules import Timeline, layer_program, simulate
from ubatch.schedules.ring import Ring, interleave


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


# ----------------------------------------------------------------------------------- the baton's rules, as a pure table


Order = list[tuple[int, str]]


def slow_interleave(programs: Sequence[Sequence[str]], lead: int) -> Order:
    """The rules in words, with a queue of living lanes; shares nothing with `Ring`."""
    stages = [[*program, "end"] for program in programs]
    living = deque(range(len(programs)))
    kept = lead
    order: Order = []
    while living:
        lane = living[0]
        order.append((lane, stages[lane].pop(0)))
        if not stages[lane]:
            living.popleft()
        elif lane == 0 and kept > 0:
            kept -= 1
        else:
            living.rotate(-1)
    return order


def numbered(lengths: Sequence[int]) -> list[list[str]]:
    return [[f"p{index}" for index in range(length)] for length in lengths]


# ------------------------------------------------------------------------------------------------ the transition table


def test_a_ring_knows_who_is_alive_who_holds_and_what_was_passed_and_starts_again() -> None:
    ring = Ring(3)
    assert (ring.holder, ring.alive, ring.passed) == (0, [True] * 3, [0] * 3)
    assert [ring.at_point(0), ring.at_point(1), ring.at_point(2), ring.at_point(0)] == [1, 2, 0, 1]
    assert ring.passed == [2, 1, 1]
    assert ring.at_end(1) == 2
    assert ring.alive == [True, False, True]
    assert [ring.at_point(2), ring.at_point(0), ring.at_end(2)] == [0, 2, 0], "a lane that has ended is skipped"
    assert [ring.at_point(0), ring.at_point(0)] == [0, 0], "who is alone keeps the baton"
    assert (ring.at_end(0), ring.holder, ring.alive) == (-1, -1, [False] * 3)
    ring.reset(lead=1)
    assert (ring.holder, ring.alive, ring.passed) == (0, [True] * 3, [0] * 3)
    assert [ring.at_point(0), ring.at_point(0), ring.at_point(1)] == [0, 1, 2], "lane 0 alone leads"


# ---------------------------------------------------------------------------------------------------- the interleaving


@pytest.mark.parametrize("lead", range(5))
@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_against_the_oracle_for_lanes_of_every_mix_of_lengths(lanes: int, lead: int) -> None:
    for lengths in product((0, 1, 2, 5), repeat=lanes):
        programs = numbered(lengths)
        assert interleave(programs, lead=lead) == slow_interleave(programs, lead), (lengths, lead)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), st.integers(0, 10))
def test_against_the_oracle_at_random(lengths: list[int], lead: int) -> None:
    programs = numbered(lengths)
    order = interleave(programs, lead=lead)
    assert order == slow_interleave(programs, lead)
    for lane, program in enumerate(programs):  # every stage once, in its lane's order
        assert [stage for runner, stage in order if runner == lane] == [*program, "end"]
