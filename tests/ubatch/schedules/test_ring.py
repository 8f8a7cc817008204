"""The baton's rules as a pure table: which lane runs next, and the resulting interleaving."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ubatch.schedules.ring import Ring, interleave
from ubatch.schedules.schedule import Point

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


def test_a_new_ring_starts_with_lane_0() -> None:
    ring = Ring(3)
    assert (ring.holder, ring.alive, ring.passed) == (0, [True] * 3, [0] * 3)


def test_a_point_hands_on_round_the_ring() -> None:
    ring = Ring(3)
    assert [ring.at_point(0), ring.at_point(1), ring.at_point(2), ring.at_point(0)] == [1, 2, 0, 1]
    assert ring.passed == [2, 1, 1]


def test_lane_0_keeps_the_baton_through_its_lead_and_no_other_lane_does() -> None:
    ring = Ring(2, lead=2)
    assert [ring.at_point(0), ring.at_point(0), ring.at_point(0)] == [0, 0, 1]
    assert ring.at_point(1) == 0
    assert ring.at_point(0) == 1


def test_a_lane_that_ends_is_skipped_from_then_on() -> None:
    ring = Ring(3)
    assert ring.at_point(0) == 1
    assert ring.at_end(1) == 2
    assert ring.alive == [True, False, True]
    assert [ring.at_point(2), ring.at_point(0), ring.at_point(2)] == [0, 2, 0]


def test_a_lane_that_is_alone_keeps_the_baton_and_the_last_end_empties_the_ring() -> None:
    ring = Ring(2)
    assert ring.at_end(0) == 1
    assert [ring.at_point(1), ring.at_point(1)] == [1, 1]
    assert ring.at_end(1) == -1
    assert ring.holder == -1
    assert ring.alive == [False, False]


def test_reset_starts_again_with_another_lead() -> None:
    ring = Ring(2)
    ring.at_end(0)
    ring.at_end(1)
    ring.reset(lead=1)
    assert (ring.holder, ring.alive, ring.passed) == (0, [True, True], [0, 0])
    assert [ring.at_point(0), ring.at_point(0)] == [0, 1]


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


def test_two_equal_lanes_alternate() -> None:
    assert interleave([["a", "b"], ["a", "b"]]) == [
        (0, "a"),
        (1, "a"),
        (0, "b"),
        (1, "b"),
        (0, "end"),
        (1, "end"),
    ]


def test_a_lead_longer_than_lane_0_lets_it_run_to_its_end() -> None:
    assert interleave([["a", "b"], ["a"]], lead=9) == [(0, "a"), (0, "b"), (0, "end"), (1, "a"), (1, "end")]


# ----------------------------------------------------------------------------------------------------- SGLang's orders

STAGE = {  # what runs before each point of a decode layer; output of a layer runs with the next layer's prepare
    Point.ATTN_PREPARE: "output+prepare",
    Point.SELECT: "core",
    Point.DISPATCH: "dispatch_a+shared",
    Point.COMBINE: "experts+combine_a",
    Point.OUTPUT: "combine_b",
}
STEADY_DECODE = [
    "A.core",
    "B.combine_b",
    "A.dispatch_a+shared",
    "B.output+prepare",
    "A.experts+combine_a",
    "B.core",
    "A.combine_b",
    "B.dispatch_a+shared",
    "A.output+prepare",
    "B.experts+combine_a",
]
# Qwen3 has no shared expert and runs the output together with combine's arrival.
QWEN3 = {
    Point.ATTN_PREPARE: "prepare",
    Point.SELECT: "core",
    Point.DISPATCH: "dispatch_a",
    Point.COMBINE: "experts+combine_a",
    Point.LAYER: "combine_b+output",
}
STEADY_QWEN3_DECODE = [
    "A.core",
    "B.combine_b+output",
    "A.dispatch_a",
    "B.prepare",
    "A.experts+combine_a",
    "B.core",
    "A.combine_b+output",
    "B.dispatch_a",
    "A.prepare",
    "B.experts+combine_a",
]


@pytest.mark.parametrize(("stages", "steady"), [(STAGE, STEADY_DECODE), (QWEN3, STEADY_QWEN3_DECODE)])
def test_sglang_decode_order(stages: dict[Point, str], steady: list[str]) -> None:
    layers = 6
    order = interleave([list(stages) * layers] * 2, lead=2)
    named = [f"{'AB'[lane]}.{stages[Point(point)]}" for lane, point in order if point != "end"]
    first = named.index("A.core", len(steady))  # past the lead
    assert named[first : first + 3 * len(steady)] == steady * 3
