"""The search for a request that kills engines: its transitions, and what it finds in simulated engines."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from killable_engines import NOBODY, Engines

from serving.engine.restarts import SEARCH_RESTARTS
from serving.engine.suspects import PROGRESS, Suspects, Verdict

SEARCHING = Verdict(searching=True)


def fail(suspects: Suspects, in_step: str, *, inside: bool = True, gone: str = "", waiting: str = "") -> Verdict:
    alive = [request for request in in_step + waiting if request not in gone]
    return suspects.failed(in_step, inside=inside, alive=alive)


def searching(requests: str) -> Suspects:
    """After two failures with these in the step."""
    suspects = Suspects()
    assert fail(suspects, requests) == NOBODY
    assert suspects.allowed is None
    assert fail(suspects, requests) == SEARCHING
    return suspects


def clear(suspects: Suspects, *requests: str) -> None:
    """Let them make progress; the last one ends the test."""
    moved = [suspects.progressed(request, PROGRESS) for request in requests]
    assert moved == [False] * (len(requests) - 1) + [True]


def test_nobody_is_suspected_for_a_signal_or_outside_a_step() -> None:
    suspects = Suspects()
    for _ in range(5):
        assert fail(suspects, "ab", inside=False) == NOBODY
        assert fail(suspects, "") == NOBODY
    assert not suspects.watching
    assert suspects.may_run("a")


def test_progress_takes_strikes_away() -> None:
    suspects = Suspects()
    fail(suspects, "abc")
    assert suspects.watching
    assert not suspects.progressed("a", PROGRESS - 1)
    assert not suspects.progressed("a", 1)
    assert not suspects.progressed("b", PROGRESS - 1)
    assert not suspects.gone("c")
    assert fail(suspects, "abcd") == SEARCHING
    assert suspects.allowed == {"b"}


def test_nobody_is_watched_once_all_made_progress() -> None:
    suspects = Suspects()
    fail(suspects, "ab")
    suspects.progressed("a", PROGRESS)
    suspects.gone("b")
    assert not suspects.watching


def test_a_single_suspect_is_guilty_at_the_third_failure() -> None:
    """Two may be the fault of a machine that is too busy."""
    suspects = Suspects()
    assert fail(suspects, "a") == NOBODY
    assert fail(suspects, "a") == SEARCHING
    assert suspects.allowed == {"a"}
    assert fail(suspects, "a") == Verdict(("a",), searching=True)
    assert suspects.allowed is None


def test_a_group_is_halved_until_one_is_left() -> None:
    suspects = searching("abcdefgh")
    for group in ("abcd", "ab", "a"):
        assert suspects.allowed == set(group)
        assert not suspects.may_run("new")
        verdict = fail(suspects, group)
    assert verdict == Verdict(("a",), searching=True)
    for group in ("b", "cd", "efgh"):  # others may be guilty, too
        assert suspects.allowed == set(group)
        clear(suspects, *group)
    assert suspects.allowed is None
    assert not suspects.watching


def test_a_second_half_that_must_be_guilty_is_cut_without_a_test() -> None:
    suspects = searching("abcdefgh")
    for group in ("abcd", "ef", "g"):
        assert suspects.allowed == set(group)
        clear(suspects, *group)
    assert suspects.allowed == {"h"}
    assert fail(suspects, "h") == Verdict(("h",), searching=True)
    assert suspects.allowed is None
    assert not suspects.watching  # engines have worked in this search: no doubt


def test_only_requests_of_the_step_are_searched_first() -> None:
    suspects = searching("abcdefgh")
    assert fail(suspects, "ab") == SEARCHING  # the others of its group had no step yet
    assert suspects.allowed == {"a"}
    clear(suspects, "a")
    assert fail(suspects, "b") == Verdict(("b",), searching=True)
    assert suspects.allowed == set("cd")


def test_requests_that_progressed_in_the_test_are_not_searched_further() -> None:
    suspects = searching("abcdefgh")
    assert not suspects.progressed("a", PROGRESS)
    assert not suspects.progressed("b", PROGRESS)
    fail(suspects, "abcd")
    assert suspects.allowed == {"c"}
    clear(suspects, "c")
    clear(suspects, "d")
    clear(suspects, *"efgh")
    assert suspects.allowed is None
    assert fail(suspects, "abcdx") == SEARCHING  # they have one strike from the search
    assert suspects.allowed == {"a"}


def test_a_signal_during_a_test_repeats_it() -> None:
    suspects = searching("abcd")
    assert not suspects.progressed("c", PROGRESS)  # an output that was on its way
    suspects.progressed("a", PROGRESS)
    assert fail(suspects, "ab", inside=False) == NOBODY
    assert suspects.allowed == set("ab")
    clear(suspects, "b")
    assert suspects.allowed == {"c"}
    assert not suspects.progressed("c", PROGRESS - 1)


def test_requests_about_to_leave_clear_nobody_and_convict_nobody() -> None:
    suspects = searching("ab")
    clear(suspects, "a")
    assert fail(suspects, "ab") == SEARCHING  # `a` was aborted, and still in the step
    assert suspects.allowed == {"b"}
    assert fail(suspects, "a") == SEARCHING
    assert suspects.allowed == {"b"}
    clear(suspects, "b")
    assert suspects.allowed is None
    assert fail(suspects, "ac") == SEARCHING  # for `a` it is the third
    assert suspects.allowed == {"a"}


def test_requests_that_are_gone_get_no_strike_but_nobody_was_alone_with_them() -> None:
    suspects = Suspects()
    for _ in range(3):
        assert fail(suspects, "z", gone="z") == NOBODY
    assert not suspects.watching
    fail(suspects, "a")
    assert fail(suspects, "az", gone="z") == SEARCHING
    assert suspects.allowed == {"a"}
    assert fail(suspects, "az", gone="z") == SEARCHING
    assert suspects.allowed == {"a"}
    assert fail(suspects, "a") == Verdict(("a",), searching=True)


def test_suspects_that_leave_end_their_test() -> None:
    suspects = searching("abcd")
    assert not suspects.gone("c")
    assert not suspects.gone("a")
    assert suspects.allowed == {"b"}
    assert suspects.gone("b")
    assert suspects.allowed == {"d"}
    assert suspects.gone("d")
    assert suspects.allowed is None
    assert not suspects.watching


def searched_alone(suspects: Suspects, request: str) -> Verdict:
    assert fail(suspects, request) == NOBODY
    assert fail(suspects, request) == SEARCHING
    return fail(suspects, request)


def doubting() -> Suspects:
    """One was called guilty, and nobody has made progress."""
    suspects = Suspects()
    assert searched_alone(suspects, "G") == Verdict(("G",), searching=True)
    assert suspects.allowed is None
    assert suspects.watching
    return suspects


def test_in_doubt_nobody_is_guilty_and_failures_are_ordinary_ones() -> None:
    suspects = doubting()
    assert fail(suspects, "ab") == NOBODY
    assert fail(suspects, "ab") == NOBODY
    for request in "abab":
        assert suspects.allowed == {request}
        assert fail(suspects, request) == NOBODY


def test_in_doubt_parts_of_a_group_that_failed_come_last() -> None:
    suspects = doubting()
    fail(suspects, "abcdefgh")
    fail(suspects, "abcdefgh")
    for group in ("abcd", "efgh", "ab", "cd", "ef", "gh", "a", "b", "c"):
        assert suspects.allowed == set(group)
        assert fail(suspects, group) == NOBODY
    clear(suspects, "d")
    assert suspects.allowed == {"e"}
    assert fail(suspects, "e") == Verdict(("e",), searching=True)


def test_in_doubt_one_that_is_no_suspect_is_tested_first() -> None:
    suspects = doubting()
    fail(suspects, "a")
    assert fail(suspects, "a", waiting="xyz") == NOBODY
    assert suspects.allowed == {"x"}
    assert fail(suspects, "x", waiting="ayz") == NOBODY  # it may be another that kills
    assert suspects.allowed == {"y"}
    clear(suspects, "y")
    assert suspects.allowed == {"a"}
    assert fail(suspects, "a", waiting="xyz") == Verdict(("a",), searching=True)
    assert suspects.allowed == {"x"}


@pytest.mark.parametrize("ended_well", [False, True])
def test_any_progress_or_whole_output_ends_doubt(ended_well: bool) -> None:
    suspects = doubting()
    suspects.progressed("x", PROGRESS - 1)
    suspects.gone("y")
    assert suspects.watching
    if ended_well:
        suspects.gone("x", well=True)
    else:
        suspects.progressed("x", 1)
    assert not suspects.watching
    assert searched_alone(suspects, "a") == Verdict(("a",), searching=True)


def test_progress_in_an_earlier_search_proves_nothing_in_the_next() -> None:
    suspects = searching("ab")
    clear(suspects, "a")
    assert fail(suspects, "b") == Verdict(("b",), searching=True)
    assert searched_alone(suspects, "c") == Verdict(("c",), searching=True)
    for _ in range(3):
        assert fail(suspects, "d") == NOBODY


@pytest.mark.parametrize(
    ("guilty", "of_search", "ordinary"),
    [
        ((0,), 1 + 6, 1),
        ((63,), 1 + 1, 1),
        ((0, 63), 1 + 6 + 2, 1),
        ((0, 1), 1 + 6 + 1, 2),  # after 0 comes 1 alone: it may be the engines
        ((0, 1, 2), 1 + 6 + 2, 3),
        ((31, 32), 1 + 2 + 6, 1),
        ((62, 63), 1 + 2, 1),
    ],
)
def test_failures_until_the_guilty_among_64_are_found(guilty: tuple[int, ...], of_search: int, ordinary: int) -> None:
    engines = Engines(random.Random(1), capacity=64, admits=64)
    for number in range(64):
        engines.add(tokens=200, kills_at=20 if number in guilty else None)
    engines.run()
    assert (engines.restarts_of_search, engines.ordinary) == (of_search, ordinary)


@pytest.mark.parametrize(
    ("requests", "tokens_before", "of_search"), [(1, 0, 2), (2, 0, 2), (4, 0, 3), (64, 0, 7), (64, 30, 7)]
)
def test_if_each_step_fails_one_is_ended(requests: int, tokens_before: int, of_search: int) -> None:
    """The rest reaches the limit of ordinary restarts, 3 by default; new requests change nothing."""
    engines = Engines(random.Random(1), capacity=64, admits=64)
    for _ in range(requests):
        engines.add(tokens=200, kills_at=None)
    while any(request.made < tokens_before for request in engines.requests.values()):
        engines.step()
    engines.broken = True
    while engines.ordinary < 3 + 1:
        engines.step()
        engines.add(tokens=200, kills_at=None)
    assert len(engines.guilty) == 1
    assert engines.restarts_of_search == of_search


def test_a_search_for_two_among_1024_is_within_its_limit() -> None:
    engines = Engines(random.Random(1), capacity=1024, admits=1024)
    for number in range(1024):
        engines.add(tokens=30, kills_at=5 if number in (0, 512) else None)  # the worst places
    engines.run()
    assert engines.inside_failures == 2 + 2 * 10
    assert engines.restarts_of_search == 21 <= SEARCH_RESTARTS


@pytest.mark.wide
@given(st.randoms(use_true_random=False), st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=150, deadline=None)
@example(random.Random(0), 40, 40)
def test_any_poisonous_requests_are_found_and_no_others(rng: random.Random, num_requests: int, capacity: int) -> None:
    admits, overlapped, stays = rng.choice([1, 3, capacity]), rng.random() < 0.5, rng.random() < 0.5
    engines = Engines(rng, capacity, admits, overlapped, stays)
    innocent = [None] * rng.choice([0, 1, 6, 6])
    for _ in range(num_requests):
        engines.add(rng.randint(1, 40), rng.choice([*innocent, 0, rng.randint(0, 40)]))
        for _ in range(rng.choice([0, 0, 1, 5])):
            engines.step()
        match rng.randrange(12):
            case 0:
                engines.leave()
            case 1:
                engines.kill()
            case 2:
                engines.kill(outside_a_step=True)
    engines.run()
    assert engines.ended | engines.guilty | engines.left == set(engines.all)
    assert not engines.ended & engines.poisonous
