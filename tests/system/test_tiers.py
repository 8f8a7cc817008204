"""The tiers of the tests: each is run by one target, and the quickest ones show something of everything.

Markers that tests are given: by what their code reaches, and by sampling.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import served
from needs import leaves_out, mark_left_out, needs_of, sample_of
from repository import ROOT, SUPPORT, TESTS
from serve_processes import Server

import ranks

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = ("test", "test-wide", "test-slow")
CONFORMANCE = sorted(TESTS.rglob("test_*_conformance.py"))


def selection(target: str) -> str:
    """The expression of markers that a target passes to pytest."""
    found = re.search(rf"^{target}: .*\n\t\$\(PYTEST\) -m (\"[^\"]*\"|\S+)", MAKEFILE, re.MULTILINE)
    assert found is not None, target
    return found[1].strip('"')


@pytest.mark.parametrize("marks", list(itertools.product([False, True], repeat=2)), ids=str)
def test_a_test_is_in_one_tier(marks: tuple[bool, bool]) -> None:
    names = dict(zip(("slow", "wide"), marks, strict=True))
    assert sum(bool(eval(selection(target), {}, dict(names))) for target in TARGETS) == 1


def test_the_fast_ones_are_among_those_of_make_test() -> None:
    fast = {*selection("test-fast").split(" and ")}
    assert {*selection("test").split(" and "), "not long", "not alike"} <= fast


def test_ci_runs_what_is_not_slow() -> None:
    steps = re.findall(r"^step make (\S+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert [step for step in steps if step in TARGETS] == ["test", "test-wide"]


def without(path: Path, *left_out: str) -> Iterator[str]:
    """The tests of a file that have none of these markers, on all parameters: a sample is never empty."""
    marks = {f"pytest.mark.{name}" for name in left_out}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    of_all = [line.value for line in tree.body if isinstance(line, ast.Assign) and "pytestmark" in ast.unparse(line)]
    if marks & {ast.unparse(mark) for value in of_all for mark in getattr(value, "elts", [value])}:
        return
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        if function.name.startswith("test_") and not marks & {*map(ast.unparse, function.decorator_list)}:
            yield function.name


@pytest.mark.wide
@pytest.mark.long
def test_every_file_that_ci_runs_has_tests_in_make_test() -> None:
    files = [path for path in TESTS.rglob("test_*.py") if path.parent.name not in ("clients", "stub_cuda")]
    assert len(files) > 280
    of_ci = {path for path in files if any(without(path, "slow", "gpu"))}
    shown = {path for path in files if any(without(path, "slow", "wide", "gpu"))}
    assert {path.name for path in of_ci - shown} == {"test_system_two_hosts.py"}, "it takes long"


@pytest.mark.parametrize("path", CONFORMANCE, ids=lambda path: path.stem)
def test_no_check_of_a_conformance_suite_is_wide(path: Path) -> None:
    """Of some, parameters are."""
    checks = [*without(path, "slow", "gpu")]
    assert checks
    assert checks == [*without(path, "slow", "wide", "gpu")]


# -- markers that tests are given --------------------------------------------------------------------------------------


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
    """A parameter of a test, with `sample(every)` or `wide_sample(every)`, and marked by itself or not."""

    def __init__(self, name: str, every: int | None, *marks: str, by: str = "sample", **params: object) -> None:
        self.nodeid, self.callspec = name, SimpleNamespace(params=params)
        self._marks = {mark: SimpleNamespace(name=mark, args=()) for mark in marks}
        if every is not None:
            self._marks[by] = SimpleNamespace(name=by, args=(every,))

    @property
    def slow(self) -> bool:
        return "slow" in self._marks

    @property
    def wide(self) -> bool:
        return "wide" in self._marks

    @property
    def alike(self) -> bool:
        return "alike" in self._marks

    def iter_markers(self) -> Any:
        return iter(self._marks.values())

    def get_closest_marker(self, name: str) -> Any:
        return self._marks.get(name)

    def add_marker(self, name: str) -> None:
        assert not {"slow", "wide", "alike"} & self._marks.keys()
        self._marks[name] = SimpleNamespace(name=name, args=())


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


def test_of_what_is_left_parameters_are_wide() -> None:
    """By `wide_sample(n)`, or every fourth where a test is long or starts something; none that needs a GPU.

    Of a quick test as many are `alike`."""
    asked = [Item(f"a.py::test_a[{place}]", 3, by="wide_sample", case=place) for place in range(5)]
    long = [Item(f"a.py::test_b[{place}]", None, "long", case=place) for place in range(5)]
    both = [Item(f"a.py::test_c[{place}]", 2, "ranks", case=place) for place in range(10)]
    triton = [Item(f"a.py::test_d[{place}]", None, *["triton"] * (place > 2), case=place) for place in range(6)]
    gpu = [Item(f"a.py::test_e[{place}]", 3, *["gpu"] * (place < 3), by="wide_sample", at=place) for place in range(6)]
    quick = [Item(f"a.py::test_f[{place}]", None, case=place) for place in range(5)]
    mark_left_out(cast(Any, [*asked, *long, *both, *triton, *gpu, *quick]))
    assert [place for place, item in enumerate(asked) if not item.wide] == [0, 3]
    assert [place for place, item in enumerate(long) if not item.wide] == [0, 3]
    assert [place for place, item in enumerate(both) if not item.slow] == [0, 2, 4, 6, 8]
    assert sum(item.wide for item in both) == 3, "of five, two are left"
    assert [place for place, item in enumerate(triton) if not item.wide] == [0, 1, 2, 3]
    assert [place for place, item in enumerate(gpu) if not item.wide] == [0, 1, 2, 3]
    assert [place for place, item in enumerate(quick) if not item.alike] == [0, 3]
    assert not any(item.wide or item.slow for item in quick)
    assert not any(item.alike for item in (*asked, *long, *both, *gpu))


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
    assert len(sample_of(cases, 1)) == 2, "all of the shortest list"
    assert len(sample_of(cases, 1, 5)) == 5
    many = [{("outer", f"{outer}"), ("inner", f"{inner}")} for outer in range(60) for inner in range(2)]
    assert len(sample_of(many, 2)) == 2, "sixty values are what is sampled"


def test_ci_shows_longer_lists_whole_than_make_test() -> None:
    """Five values of one parameter and two of another."""
    grid = [(outer, inner) for outer in range(5) for inner in range(2)]
    ci, wide = (
        [Item(f"a.py::{by}[{at}]", 10, by=by, a=at[0], b=at[1]) for at in grid] for by in ("sample", "wide_sample")
    )
    mark_left_out(cast(Any, [*ci, *wide]))
    assert [sum(not item.slow for item in ci), sum(not item.wide for item in wide)] == [5, 2]


def test_a_sample_of_what_is_slow_is_refused() -> None:
    cases = [Item(f"a.py::test_a[{place}]", 3, *["slow"] * (place < 4), case=place) for place in range(6)]
    mark_left_out(cast(Any, cases))
    assert [item.slow for item in cases] == [True] * 4 + [False, True], "one, though every third is slow"
    slow = [Item(f"a.py::test_a[{place}]", 3, "slow", case=place) for place in range(6)]
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
