"""The walls of the house: who may import whom, and what a package shows.

`make lint` runs import-linter's contracts over the whole import graph. What it cannot say stands here: that the
runtime imports *nothing* beyond torch and the standard library, and that each package's `__all__` is complete.
"""

from __future__ import annotations

import ast
import importlib
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT
from setuptools import find_packages

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
