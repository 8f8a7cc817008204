"""Markers that tests are given: by what their code reaches, and by sampling."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import served
from needs import leaves_out, mark_left_out, needs_of
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


def test_a_sample_is_the_first_and_every_nth() -> None:
    slow: list[str] = []

    def item(name: str, every: int | None) -> Any:
        marker = None if every is None else SimpleNamespace(args=(every,))
        return SimpleNamespace(
            nodeid=name, get_closest_marker=lambda _: marker, add_marker=lambda mark: slow.append(f"{name} {mark}")
        )

    names = [f"a.py::test_a[{place}]" for place in range(5)]
    mark_left_out([item(name, 3) for name in names] + [item("a.py::test_b[1]", 3), item("a.py::test_c", None)])
    assert slow == [f"{names[place]} slow" for place in (1, 2, 4)]


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
