"""What is released: a source distribution from which the tests run, and a wheel that needs no repository."""

from __future__ import annotations

import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from fresh_trees import copy_tree, make_environment, run
from repository import ROOT

from ubatch import __version__

PACKAGES = ("ubatch", "moe", "attention", "model_runner", "serving")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository without what `make` wrote: building writes next to the sources."""
    return copy_tree(tmp_path_factory.mktemp("source") / "ubatch")


@pytest.fixture(scope="module")
def unpacked(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the source distribution holds."""
    folder = tmp_path_factory.mktemp("sdist")
    before = files_of(source)
    build = f"import setuptools.build_meta as build; build.build_sdist({str(folder)!r})"
    run([sys.executable, "-c", build], source)
    with tarfile.open(folder / f"ubatch-{__version__}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    found = folder / f"ubatch-{__version__}"
    assert before - files_of(found) - {".gitignore"} == set()
    return found


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.timeout(140)
def test_the_tests_run_from_the_source_distribution(unpacked: Path) -> None:
    words = ["tests/ubatch/schedules", "tests/serving/options/test_nearest.py"]
    run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *words[1:]], unpacked)
    collected = run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words], unpacked
    )
    assert len(collected.splitlines()) > 100


@pytest.mark.slow
@pytest.mark.timeout(140)
def test_a_wheel_needs_no_repository(unpacked: Path, tmp_path: Path) -> None:
    """In an environment of its own, which borrows our dependencies but not the packages that are installed there."""
    build = f"import setuptools.build_meta as build; build.build_wheel({str(tmp_path)!r})"
    run([sys.executable, "-c", build], unpacked)
    (wheel,) = tmp_path.glob("*.whl")
    fresh = tmp_path / "venv"
    python, site = make_environment(fresh, str(wheel))
    assert run([str(fresh / "bin" / "ubatch"), "--version"], tmp_path) == f"ubatch {__version__}\n"
    where = f"import {', '.join(PACKAGES)}; print(*(each.__file__ for each in ({', '.join(PACKAGES)})), sep='\\n')"
    for line in run([str(python), "-c", where], tmp_path).splitlines():
        assert Path(line).is_relative_to(site)
        assert (Path(line).parent / "py.typed").is_file()
    kernels = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.c")]
    assert len(kernels) > 4
    data = (
        "ubatch/kernels/c_vectors.h",
        "ubatch/kernels/c_tiles.h",
        "ubatch/trace/page.html",
        "serving/workbench/planning/constants.yaml",
    )
    for name in (*data, *kernels):
        assert (site / name).is_file()
    assert "serve" in run([str(fresh / "bin" / "ubatch"), "--help"], tmp_path)


def test_extras_are_in_the_table() -> None:
    """docs/install.md names every extra, and only those."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text()
    for extra in extras:
        assert f"| `{extra}` |" in page
