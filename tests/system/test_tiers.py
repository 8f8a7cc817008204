"""The tiers of the tests: each is run by one target, and the quickest ones show something of everything."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT, TESTS

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
    assert {*selection("test").split(" and ")} < {*selection("test-fast").split(" and ")}


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
    assert len(files) > 400
    of_ci = {path for path in files if any(without(path, "slow", "gpu"))}
    shown = {path for path in files if any(without(path, "slow", "wide", "gpu"))}
    assert {path.name for path in of_ci - shown} == {"test_system_link_down.py"}, "it takes long"


@pytest.mark.parametrize("path", CONFORMANCE, ids=lambda path: path.stem)
def test_no_check_of_a_conformance_suite_is_wide(path: Path) -> None:
    """Of some, parameters are."""
    checks = [*without(path, "slow", "gpu")]
    assert checks
    assert checks == [*without(path, "slow", "wide", "gpu")]
