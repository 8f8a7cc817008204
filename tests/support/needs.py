"""Markers that a test is given: what it needs, found in its code (`ranks`, `server`, `triton`); by sampling, others.

A test has a need if it, a fixture of its, or a function or class of `tests/` that these name, names one of `NEEDS`.
Triton it needs if its id says so: a file, a test or a parameter.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from repository import ROOT

NEEDS = {
    **dict.fromkeys(["run_ranks", "EngineClient", "LocalEngines", "get_context", "AsSpawned"], "ranks"),
    **dict.fromkeys(["subprocess", "Server", "running_engine"], "server"),
}
EVERYWHERE = {"_forked_ranks"}
"""Prepares every test for ranks, whether or not it starts any."""
TESTS = str(ROOT / "tests")
COSTLY = {"ranks", "server", "triton", "long"}
"""What takes its time has one of these markers."""
EVERY = 4
"""Of the parameters of such a test `make test` runs every n-th; `wide_sample(n)` says otherwise, also of others.

Of the parameters of a quick test `make test-fast` runs every n-th."""
LEFT_OUT = {"slow", "wide", "gpu"}
"""Of what has one of these, `make test` runs nothing on a machine without a GPU."""
_FEW_VALUES = 3
"""A parameter with at most so many values is shown whole; one with more, or another in each case, is sampled."""
_FEW_VALUES_OF_CI = 6


def mark_needs(items: Iterable[pytest.Item]) -> None:
    """Give tests the markers of what they need; `timeout` and others are left to their authors."""
    found: dict[Any, set[str]] = {}
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        if item.function not in found:  # once for all parameters
            fixtures = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009 - pytest has no public name for it
            chains = [chain for name, chain in fixtures.items() if name not in EVERYWHERE]
            functions = {item.function, *(definition.func for chain in chains for definition in chain)}
            found[item.function] = {need for function in functions for need in needs_of(function)}
        for need in sorted(found[item.function] | ({"triton"} if "triton" in item.nodeid else set())):
            item.add_marker(need)


def mark_left_out(items: Iterable[pytest.Item]) -> None:
    """Mark parameters that runs leave out, all but those of `sample_of`: `slow` by `sample(n)`, else `wide` or `alike`.

    Raises:
        pytest.UsageError: all parameters of a test with `sample(n)` are slow by themselves.
    """
    tests: dict[str, list[Any]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, own in tests.items():
        if len(own) == 1:
            continue  # asked for by its id, or without parameters
        if (sample := own[0].get_closest_marker("sample")) is not None:
            quick = [item for item in own if item.get_closest_marker("slow") is None]
            if not quick:
                raise pytest.UsageError(
                    f"{test}: `sample` has nothing to choose from: all parameters are slow. Remove it."
                )
            _keep(quick, sum(item in quick for item in own[:: sample.args[0]]) or 1, "slow", _FEW_VALUES_OF_CI)
        left = [item for item in own if not LEFT_OUT & _marks(item)]
        if (wide_sample := own[0].get_closest_marker("wide_sample")) is not None:
            _keep(left, -(-len(left) // wide_sample.args[0]), "wide")
            continue
        costly, quick = ([item for item in left if bool(COSTLY & _marks(item)) is each] for each in (True, False))
        _keep(costly, -(-len(costly) // EVERY), "wide")
        _keep(quick, -(-len(quick) // EVERY), "alike")


def _marks(item: pytest.Item) -> set[str]:
    return {mark.name for mark in item.iter_markers()}


def _keep(items: Sequence[Any], size: int, mark: str, few_values: int = _FEW_VALUES) -> None:
    """Mark all parameters of a test but `size`, or some more."""
    if size >= len(items):
        return
    cases = [{(name, _shown(each)) for name, each in item.callspec.params.items()} for item in items]
    kept = sample_of(cases, size, few_values)
    for place in set(range(len(items))) - set(kept):
        items[place].add_marker(mark)


def _shown(value: object) -> str:
    """A value as text; its place in memory if it has none, being too long (an integer of 5,000 digits) or too deep."""
    try:
        return repr(value)
    except (ValueError, RecursionError):
        return str(id(value))


def sample_of(cases: Sequence[Set[tuple[str, str]]], size: int, few_values: int = _FEW_VALUES) -> list[int]:
    """Places of `size` cases, as (parameter, value) pairs, so chosen that they show as many values as they can.

    Each time the one that shows most new values; of equal ones, that with the values shown least often; then the
    first, and every n-th after it. There are more if else a value of a parameter with few values were not shown.
    """
    every = -(-len(cases) // max(size, 1))
    every_pair = set().union(*cases)
    counts = Counter(name for name, _ in every_pair)
    few = {pair for pair in every_pair if counts[pair[0]] <= min(few_values, len(cases) - 1)}
    shown: Counter[tuple[str, str]] = Counter()

    def rank(place: int) -> tuple[int, int, int, bool, int]:
        new = {pair for pair in cases[place] if not shown[pair]}
        return -len(new & few), -len(new), sum(shown[pair] for pair in cases[place]), place % every > 0, place

    kept: list[int] = []
    while len(kept) < size or not few <= shown.keys():
        kept.append(min(set(range(len(cases))) - set(kept), key=rank))
        shown.update(cases[kept[-1]])
    return kept


def leaves_out(expression: str, path: Path) -> bool:
    """Whether `-m` of the kind `not a and not b` leaves out all tests of a file: by its name, or its `pytestmark`."""
    if not re.fullmatch(r"not \w+( and not \w+)*", expression) or path.suffix != ".py":
        return False
    of_all = " ".join(re.findall(r"^pytestmark = (.*)", path.read_text(encoding="utf-8"), re.MULTILINE))
    marks = re.findall(r"mark\.(\w+)", of_all) + ["triton"] * ("triton" in path.name)
    return any(f"not {mark}" in expression.split(" and ") for mark in marks)


@functools.cache
def needs_of(function: Any) -> frozenset[str]:
    """The needs of a function or a class of `tests/`; of anything else, none."""
    found: set[str] = set()
    seen: set[Any] = set()
    left = [function]
    while left:
        thing = left.pop()
        if thing not in seen:
            seen.add(thing)
            own, named = _own_needs(thing)
            found |= own
            left += named
    return frozenset(found)


@functools.cache
def _own_needs(thing: Any) -> tuple[frozenset[str], tuple[Any, ...]]:
    """What a function or class itself names: needs, and other functions and classes."""
    while isinstance(thing, FunctionType) and hasattr(thing, "__wrapped__"):
        thing = thing.__wrapped__
    if not isinstance(thing, FunctionType | type):
        return frozenset(), ()
    pairs = list(_named(thing))
    functions = {id(value): value for _, value in pairs if isinstance(value, FunctionType | type)}
    return frozenset(NEEDS[name] for name, _ in pairs if name in NEEDS), tuple(functions.values())


def _named(thing: FunctionType | type) -> Iterator[tuple[str, Any]]:
    """Names that the code of a function or of a class's methods uses, and what they stand for."""
    if isinstance(thing, type):
        for value in list(vars(thing).values()):  # pydantic's classes change as they are looked at
            yield "", getattr(value, "__func__", getattr(value, "fget", value))
        return
    if not thing.__code__.co_filename.startswith(TESTS):
        return
    names = set(_names(thing.__code__))
    for name in names:
        value = thing.__globals__.get(name)
        yield name, value
        if isinstance(value, ModuleType):  # also what it is asked for
            yield value.__name__.partition(".")[0], None
            yield from ((inner, vars(value)[inner]) for inner in names & vars(value).keys())


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
