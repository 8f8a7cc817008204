"""Markers that tests are given: by what their code reaches, and by sampling."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import served
from needs import leaves_out, mark_left_out, needs_of, sample_of
from repository import ROOT, SUPPORT, TESTS
from serve_processes import Server

import ranks


def starts_ranks() -> None:
    ranks.run_ranks(print, 2)


class Holder:
    """Starts a server when it is made."""

    def __init__(self) -> None:
        self.server = Server("--help")


def uses_a_holder() -> object:
    return [Holder() for _ in range(1)]


def calls_in_a_function_of_its_own() -> Any:
    def inner() -> None:
        starts_ranks()

    return inner


def reads_only() -> object:
    return served.values({}, "name")


def test_needs_are_found_through_helpers_and_classes() -> None:
    assert needs_of(starts_ranks) == {"ranks"}
    assert needs_of(calls_in_a_function_of_its_own) == {"ranks"}
    assert needs_of(uses_a_holder) == {"server"}
    assert needs_of(reads_only) == frozenset()
    assert needs_of(len) == frozenset()


class Item:
    """A parameter of a test, with `sample(every)`, and slow by itself or not."""

    def __init__(self, name: str, every: int | None, *, slow: bool = False, **params: object) -> None:
        self.nodeid, self.slow, self.callspec = name, slow, SimpleNamespace(params=params)
        self._marks = {"sample": every and SimpleNamespace(args=(every,)), "slow": slow or None}

    def get_closest_marker(self, name: str) -> Any:
        return self._marks[name]

    def add_marker(self, name: str) -> None:
        assert (name, self.slow) == ("slow", False)
        self.slow = True


def test_garbage_is_collected_where_no_tests_are_collected() -> None:
    """As in the controller of pytest-xdist."""
    path = os.pathsep.join(map(str, (TESTS, SUPPORT, ROOT)))
    code = "import gc, conftest; assert gc.isenabled()"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True, timeout=100)


def test_a_sample_of_cases_is_the_first_and_every_nth() -> None:
    cases = [Item(f"a.py::test_a[{place}]", 3, case=place) for place in range(5)]
    others = [Item("a.py::test_b[1]", 3, case=1), Item("a.py::test_c", None)]
    mark_left_out(cast(Any, [*cases, *others]))
    assert [item.slow for item in cases] == [False, True, True, False, True]
    assert not any(item.slow for item in others)


@pytest.mark.parametrize("every", [2, 3, 4, 6])
def test_a_sample_shows_all_values(every: int) -> None:
    """Also where every n-th has always the same value of the inner parameter."""
    cases = [{("outer", f"{outer}"), ("inner", f"{inner}")} for outer in range(12) for inner in range(every)]
    kept = sample_of(cases, 12)
    assert len(kept) == 12
    assert set().union(*(cases[place] for place in kept)) == set().union(*cases)
    inner = Counter(pair for place in kept for pair in cases[place] if pair[0] == "inner")
    assert set(inner.values()) == {12 // every}
    assert kept == sample_of(cases, 12)


def test_a_sample_is_larger_if_it_must_be() -> None:
    cases = [{("outer", f"{outer}"), ("inner", f"{inner}")} for outer in range(5) for inner in range(2)]
    assert len(sample_of(cases, 1)) == 5
    many = [{("outer", f"{outer}"), ("inner", f"{inner}")} for outer in range(60) for inner in range(2)]
    assert len(sample_of(many, 2)) == 2, "sixty values are what is sampled"


def test_a_sample_of_what_is_slow_is_refused() -> None:
    cases = [Item(f"a.py::test_a[{place}]", 3, slow=place < 4, case=place) for place in range(6)]
    mark_left_out(cast(Any, cases))
    assert [item.slow for item in cases] == [True] * 4 + [False, True], "one, though every third is slow"
    slow = [Item(f"a.py::test_a[{place}]", 3, slow=True, case=place) for place in range(6)]
    with pytest.raises(pytest.UsageError, match=r"a\.py::test_a: `sample` has nothing to choose from"):
        mark_left_out(cast(Any, slow))
    mark_left_out(cast(Any, slow[:1]))


FAST = "not slow and not long and not triton"


@pytest.mark.parametrize(
    ("name", "text", "expression", "expected"),
    [
        ("test_a.py", "pytestmark = pytest.mark.long", FAST, True),
        ("test_a.py", "pytestmark = [needs_c, pytest.mark.long]", FAST, True),
        ("test_a.py", "pytestmark = pytest.mark.longer", FAST, False),
        ("test_a.py", "@pytest.mark.long\ndef test_one(): ...", FAST, False),
        ("test_a.py", "pytestmark = pytest.mark.long", "not slow", False),
        ("test_a.py", "pytestmark = pytest.mark.long", "slow or not long", False),
        ("test_a.py", "pytestmark = pytest.mark.long", "", False),
        ("test_a_triton.py", "", FAST, True),
        ("test_a_triton.py", "", "slow", False),
    ],
)
def test_files_that_are_left_out_are_not_imported(
    name: str, text: str, expression: str, expected: bool, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    assert leaves_out(expression, tmp_path / name) == expected
