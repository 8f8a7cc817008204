"""`make test-gpu` on a machine that lacks some packages: their tests are skipped by name, everything else counts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT, SUPPORT, TESTS

pytestmark = pytest.mark.server

SETTINGS = """
[pytest]
markers =
    gpu: needs a CUDA GPU; skipped where there is none
"""
LACKING = """
import pytest
import surely_not_installed

@getattr(pytest.mark, "gpu")
def test_something() -> None:
    pass
"""
BROKEN = "import conftest.not_there\n"


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", *arguments]
    path = os.pathsep.join([str(ROOT), str(SUPPORT)])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    (tmp_path / "test_lacking.py").write_text(LACKING)
    (tmp_path / "test_broken.py").write_text(BROKEN)
    return tmp_path


@pytest.mark.slow
def test_gpu_tests_that_need_a_missing_package_are_skipped_by_name(folder: Path) -> None:
    """But not those that lack what should have been in this tree."""
    done = run_pytest(folder, "-m", "gpu")
    assert "SKIPPED [1] test_lacking.py:0: needs surely_not_installed, which this Python lacks" in done.stdout
    assert "1 error" in done.stdout
    assert "ERROR test_broken.py" in done.stdout


@pytest.mark.slow
def test_without_that_selection_both_are_errors(folder: Path) -> None:
    done = run_pytest(folder)
    assert "2 errors" in done.stdout, done.stdout
    assert done.returncode == 2
