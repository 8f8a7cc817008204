"""The baton's rules as a pure table: which lane runs next, and the resulting interleaving."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ubatch.schedules.ring import Ring, interleave

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
