"""`.ci/gpu-python` takes a Python and a torch that this project supports, and says which it found.

The stub of CUDA where it is not loaded: its lists name tests that exist, and it asks for the Python it needs.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT, TESTS
from stub_cuda import build
from stub_cuda.counts import counts, is_loaded
from stub_cuda.mute import LEFT_OUT, UNTIL_NUMBERS

SCRIPT = ROOT / ".ci" / "gpu-python"
SUPPORTED = (3, 12, 4)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the script in a tree of its own, with nothing on its path but what it calls."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "env"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    return tmp_path


def add_python(
    tree: Path,
    name: str,
    version: tuple[int, int, int] = SUPPORTED,
    torch: str | None = "2.11.0+cu130",
    gpu: bool = True,
) -> Path:
    """An interpreter that takes itself for another version, with a torch that is only asked what it is."""
    fakes = tree / "fakes" / name
    fakes.mkdir(parents=True)
    (fakes / "sitecustomize.py").write_text(f"import sys\nsys.version_info = {(*version, 'final', 0)}\n")
    module = f"__version__ = {torch!r}\nclass cuda:\n    is_available = staticmethod(lambda: {gpu})\n"
    (fakes / "torch.py").write_text(module if torch is not None else "raise ImportError('no such thing')\n")
    program = tree / name
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/bash\nPYTHONPATH={shlex.quote(str(fakes))} exec {shlex.quote(sys.executable)} "$@"\n')
    program.chmod(0o755)
    return program


def ask(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tree / ".ci" / "gpu-python"], env={"PATH": str(tree / "bin")}, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("version", [(3, 11, 0), SUPPORTED])
@pytest.mark.parametrize("torch", ["2.11.0+cu130", "2.13.0a0+git1234", "3.0.0"])
def test_a_supported_one_is_taken(tree: Path, version: tuple[int, int, int], torch: str) -> None:
    python = add_python(tree, "bin/python3", version, torch)
    done = ask(tree)
    assert (done.returncode, done.stdout.strip()) == (0, str(python))
    numbers = ".".join(map(str, version))
    assert done.stderr.strip() == f"python3 is Python {numbers} with torch {torch}, and sees the GPU"


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ({"version": (3, 10, 9)}, "python3 is Python 3.10.9: it must be 3.11 or 3.12"),
        ({"version": (3, 13, 0)}, "python3 is Python 3.13.0: it must be 3.11 or 3.12"),
        ({"torch": "2.10.1+cu128"}, "python3 is Python 3.12.4 with torch 2.10.1+cu128: torch must be 2.11 or newer"),
        ({"torch": "2.9.0"}, "with torch 2.9.0: torch must be 2.11 or newer"),
        ({"torch": None}, "python3 is Python 3.12.4 without torch: its torch cannot be imported (ImportError: no such"),
        ({"gpu": False}, "python3 is Python 3.12.4 with torch 2.11.0+cu130: that torch sees no GPU"),
    ],
)
def test_another_one_is_not(tree: Path, python: dict[str, object], said: str) -> None:
    add_python(tree, "bin/python3", **python)  # type: ignore[arg-type]
    done = ask(tree)
    assert done.returncode == 1
    assert not done.stdout
    assert said in done.stderr


@pytest.mark.parametrize("name", ["bin/python3.12", ".venv/bin/python"])
def test_the_next_one_is_looked_at(tree: Path, name: str) -> None:
    add_python(tree, "bin/python3", torch="2.6.0+cu126")
    python = add_python(tree, name)
    done = ask(tree)
    assert done.returncode == 0
    assert (tree / done.stdout.strip()).samefile(python)
    assert "torch must be 2.11 or newer" in done.stderr


# -- the stub of CUDA --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*LEFT_OUT, *UNTIL_NUMBERS])
def test_what_is_left_out_is_there(name: str) -> None:
    file, _, test = name.partition("::")
    (found,) = TESTS.rglob(file)
    assert re.search(rf"^def {test.partition('[')[0]}\(", found.read_text(encoding="utf-8"), re.MULTILINE)


def test_another_python_is_told_what_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_version", lambda name: {"torch": "2.11.0+cpu", "triton": "3.6.0"}[name])
    with pytest.raises(
        build.WrongPython, match=r"has torch 2\.11\.0\+cpu, .* the CUDA build of 2\.11\.x\. `make stub`"
    ):
        build.headers()


def test_without_the_stub_nothing_is_counted() -> None:
    assert is_loaded() or not counts()
