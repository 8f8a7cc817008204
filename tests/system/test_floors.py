"""The walls of the house: who may import whom, what a package shows, and which names are public.

`make lint` runs import-linter's contracts over the whole import graph. What it cannot say stands here: that the
runtime imports *nothing* beyond torch and the standard library, and that each package's `__all__` is complete.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from public_names import COMMAND, FILE, changed_names, last_release, listing
from repository import ROOT
from setuptools import find_packages

import ubatch

_FIND = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
PACKAGES: list[str] = find_packages(str(ROOT), include=_FIND["include"])
FLOORS = ["ubatch", "moe", "attention", "model_runner", "serving"]
# Read only where a configuration file is given.
LAZY = {("ubatch/process/files.py", "yaml")}
# What the kernels of the floors above share.
TRITON = [ROOT / "ubatch" / "kernels" / name for name in ("triton_jit.py", "quick_launch.py")]


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """Top-level names that a file imports, and whether importing the file imports them."""
    tree = ast.parse(path.read_text())
    inside_functions = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            yield name.partition(".")[0], node not in inside_functions


@pytest.mark.long
def test_the_runtime_imports_torch_and_nothing_else() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "ubatch"}
    files = sorted((ROOT / "ubatch").rglob("*.py"))
    assert files
    for path in files:
        if path in TRITON:
            continue
        assert "triton_jit import" not in path.read_text(), f"{path} imports Triton's helpers, which only kernels may"
        relative = path.relative_to(ROOT).as_posix()
        for name, at_import in imported(path):
            if name not in allowed:
                assert (relative, name) in LAZY, f"{relative} imports {name}"
                assert not at_import, f"{relative} imports {name} when it is imported, not when it needs it"


def test_every_package_is_found() -> None:
    """A sub-package that pyproject.toml's patterns miss works from the tree and is missing from a wheel."""
    found = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for floor in FLOORS
        for path in (ROOT / floor).rglob("__init__.py")
    }
    assert sorted(PACKAGES) == sorted(found)


@pytest.mark.parametrize("name", PACKAGES)
def test_all_is_complete(name: str) -> None:
    package = importlib.import_module(name)
    public = {
        attribute
        for attribute, value in vars(package).items()
        if not attribute.startswith("_")
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", name) != "__future__"
    }
    shown = list(getattr(package, "__all__", []))
    assert len(shown) == len(set(shown)), "a name stands in __all__ twice"
    assert not public - set(shown), f"{name} defines or imports these, but __all__ does not show them"
    assert not [attribute for attribute in shown if not hasattr(package, attribute)]


@pytest.mark.parametrize("name", [name for name in PACKAGES if name.startswith("ubatch.")])
def test_a_folder_has_a_line_for_every_file(name: str) -> None:
    package = importlib.import_module(name)
    lines = [line.split()[0] for line in (package.__doc__ or "").partition("\n\n")[2].splitlines()]
    files = {path.stem for path in (ROOT / name.replace(".", "/")).glob("*.py")} - {"__init__"}
    assert sorted(lines) == sorted(files)


# -- public names ------------------------------------------------------------------------------------------------------


UNRELEASED = (ROOT / "CHANGELOG.md").read_text().partition("\n## Unreleased\n")[2].partition("\n## ")[0]


@pytest.mark.long
def test_the_list_is_that_of_the_code() -> None:
    assert FILE.read_text() == listing(), f"public names changed. Run `{COMMAND}`, and add a line to CHANGELOG.md."


def test_the_changelog_names_what_changed() -> None:
    told = set(re.findall(r"[\w.]+", UNRELEASED))
    changed = changed_names(last_release().read_text(), FILE.read_text())
    missing = sorted(changed - told)
    assert not missing, f"the section Unreleased of CHANGELOG.md does not name {', '.join(missing)}"


def test_the_last_release_is_this_version_or_an_older_one() -> None:
    version = ubatch.__version__
    assert (FILE.parent / f"public-names-{version}.txt").is_file(), f"copy {FILE.name} to public-names-{version}.txt"
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("before", "now", "names"),
    [
        ("u.f(x)\nu.g()\n", "u.f(x, y)\nu.g()\n", {"f"}),
        ("u.C()\nu.C.a: int\n", "u.C()\nu.C.b: int\n", {"C.a", "C.b"}),
        ("u.C()\nu.C.a: int = 1\n", "u.C()\nu.C.a: int = 2\n", {"C.a"}),
        ("u.C()\nu.C.a: int\n", "", {"C"}),
        ("", "u.C()\nu.C.a(self) -> int\n", {"C"}),
    ],
)
def test_what_changed(before: str, now: str, names: set[str]) -> None:
    assert changed_names(before, now) == names


@pytest.mark.parametrize("name", sorted(ubatch._MOVED))
def test_a_name_that_goes_still_works_and_warns(name: str) -> None:
    place = ubatch._MOVED[name]
    assert name not in ubatch.__all__
    assert name in UNRELEASED
    with pytest.warns(DeprecationWarning, match=rf"ubatch\.{name} .* {re.escape(place)}\.{name}\."):
        found = getattr(ubatch, name)
    assert found is getattr(importlib.import_module(place), name)


def test_importing_a_name_that_goes_warns_where_it_is_imported() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from ubatch import Ring  # noqa: F401
    assert {warning.filename for warning in caught} == {__file__}


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'ubatch' has no attribute 'nonsense'"):
        ubatch.nonsense  # noqa: B018


def test_what_someone_has_replaced_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ubatch, "dbo_yield", None)
    assert not hasattr(ubatch, "no_such_name")
    assert ubatch.dbo_yield is None
