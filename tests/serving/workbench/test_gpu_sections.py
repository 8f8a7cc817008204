"""`make gpu`, `make test-gpu` and `make bench-gpu`: rehearsed without a GPU, and what breaks hides nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT, TESTS

from serving.workbench.gpu import checks
from serving.workbench.gpu.__main__ import main as bench
from serving.workbench.gpu.checks import DECIDING, SECTIONS, files_of
from serving.workbench.gpu.parts import FIRST, REST, names_in, write_section
from serving.workbench.gpu.sections import HEADLINE
from serving.workbench.gpu.sections import SECTIONS as BENCHES

pytestmark = pytest.mark.long

PROCESS_START_S = 8
FOREIGN = (
    *("accelerate", "fastapi", "httpx", "hypothesis", "jinja2", "msgspec", "openai", "prometheus_client", "pydantic"),
    *("pytest_timeout", "tokenizers", "transformers", "uvicorn", "yaml", "zmq"),
)
"""What a machine may lack that has torch, Triton, numpy, tqdm, safetensors and pytest."""


def make(target: str, folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As on a GPU, but for the device."""
    settings = [f"GPU_PYTHON={sys.executable}", "GPU_DEVICE=cpu", f"GPU_RESULTS={folder}"]
    command = ["make", "--no-print-directory", target, *settings, *options]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTEST"))}
    return subprocess.run(
        command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True, timeout=600, check=False
    )


def sections_of(file: Path) -> dict[str, Any]:
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["device"] == "cpu"
    sections: dict[str, Any] = written["sections"]
    return sections


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_tests_are_rehearsed_on_a_machine_that_lacks_everything_else(tmp_path: Path) -> None:
    lacking = f"""
import sys

class Lacking:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        known = name.partition(".")[0] not in {FOREIGN}
        return self.finder.find_spec(name, path, target) if known else None

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Lacking(finder) for finder in sys.meta_path]
"""
    (tmp_path / "sitecustomize.py").write_text(lacking)
    done = make(
        "test-gpu",
        tmp_path,
        "GPU_OPTIONS=--only kernels",
        PYTHONPATH=str(tmp_path),
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    written = sections_of(tmp_path / "gpu-tests.json")
    kernels = written["kernels"]
    assert kernels["counts"] == {"passed": kernels["counts"]["passed"]}, "none is skipped"
    assert kernels["counts"]["passed"] > 15
    assert kernels["environment"]["torch"]
    assert all(each["seconds"] >= 0 for each in kernels["tests"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_benchmarks_are_rehearsed(tmp_path: Path) -> None:
    done = make("bench-gpu", tmp_path, "GPU_OPTIONS=--only lanes")
    assert done.returncode == 0, done.stderr
    section = sections_of(tmp_path / "gpu.json")["lanes"]
    assert section["error"] is None
    assert "Eager lanes" in (tmp_path / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_is_rehearsed(tmp_path: Path, section: str) -> None:
    done = make("test-gpu", tmp_path, f"GPU_OPTIONS=--only {section}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert list(sections_of(tmp_path / "gpu-tests.json")) == [section]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_what_decides_comes_first_and_what_fails_hides_nothing(tmp_path: Path) -> None:
    """`make gpu`, with an interpreter that only notes what it is asked to run, and fails."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nexit 1\n')
    interpreter.chmod(0o755)
    done = make("gpu", tmp_path, f"GPU_PYTHON={interpreter}")
    assert done.returncode != 0
    asked = [line.split() for line in (tmp_path / "asked").read_text().splitlines()]
    assert [(words[1], words[words.index("--only") + 1]) for words in asked] == [
        ("serving.workbench.gpu.checks", FIRST),
        ("serving.workbench.gpu", FIRST),
        ("serving.workbench.gpu.checks", REST),
        ("serving.workbench.gpu", REST),
    ]


# ------------------------------------------------------------------------------------------------------ one that breaks

GOOD = "def test_good(): pass\n"
BREAKING = {
    "crash": "import os\ndef test_before(): pass\ndef test_crash(): os._exit(9)\n",
    "hang": "import time\ndef test_before(): pass\ndef test_hang(): time.sleep(100)\n",
    "wrong": "def test_wrong(): assert 1 == 2\ndef test_after(): pass\n",
    "unreadable": "import nothing_of_that_name.at_all\n",
    "no syntax": "def\n",
    "good": GOOD,
}


@pytest.mark.slow
def test_a_section_that_breaks_loses_nothing_of_itself_or_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in BREAKING.items():
        (tmp_path / f"test_{name}.py".replace(" ", "_")).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: long\n")
    sections = {name: checks.Section((name.replace(" ", "_"),), 4.0 if name == "hang" else 20.0) for name in BREAKING}
    monkeypatch.setattr(checks, "SECTIONS", sections)
    monkeypatch.setattr(checks, "files_of", lambda name: [tmp_path / f"test_{sections[name].files[0]}.py"])
    monkeypatch.setattr(checks, "_environment", dict)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it starts sooner
    file = tmp_path / "results.json"
    assert checks.main(["--device", "cpu", "--json", str(file)]) == 1
    written = sections_of(file)
    assert {name: (found["status"], found["counts"]) for name, found in written.items()} == {
        "crash": (9, {"passed": 1}),
        "hang": (124, {"passed": 1}),
        "wrong": (1, {"failed": 1, "passed": 1}),
        "unreadable": (2, {"failed": 1}),
        "no syntax": (2, {"failed": 1}),
        "good": (0, {"passed": 1}),
    }
    assert "assert 1 == 2" in written["wrong"]["tests"][0]["error"]
    assert "nothing_of_that_name" in written["unreadable"]["tests"][0]["error"]
    printed = capfd.readouterr()
    assert "==> hang: out of time (12 s): 1 passed in " in printed.out
    assert "Not everything ran and passed: crash, hang, wrong, unreadable, no syntax." in printed.err


def test_an_earlier_runs_other_sections_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    for name in ("others", "streams"):
        write_section(file, {"device": "cpu"}, SECTIONS, name, {"status": 0})
    assert list(sections_of(file)) == ["streams", "others"]
    write_section(file, {"device": "cuda"}, SECTIONS, "kernels", {"status": 0})
    assert list(json.loads(file.read_text())["sections"]) == ["kernels"], "what a rehearsal gave is no result"


@pytest.mark.slow
def test_a_rehearsal_does_not_replace_what_a_gpu_gave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    given = json.dumps({"device": "cuda", "sections": {"streams": {}}})
    file.write_text(given)
    assert checks.main(["--device", "cpu", "--only", "streams", "--json", str(file)]) == 1
    assert bench(["--device", "cpu", "--tiny", "--only", "lanes", "--json", str(file)]) == 1
    assert capsys.readouterr().err.count("a rehearsal would replace them") == 2
    assert file.read_text() == given


def test_what_ran_on_no_gpu_is_no_success(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    skipped = {"outcome": "done: 29 skipped", "status": 0, "seconds": 1.0, "counts": {"skipped": 29}, "tests": []}
    monkeypatch.setattr(checks, "_run", lambda name, device: skipped)
    monkeypatch.setattr(checks, "_environment", lambda: {"sms": 132})
    assert checks.main(["--only", "streams"]) == 1
    assert "Not everything ran and passed: streams." in capsys.readouterr().err
    monkeypatch.setattr(checks, "_environment", lambda: {"torch": "2.11"})
    assert checks.main(["--only", "streams"]) == 1
    assert "No GPU here" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- the plan


def test_every_file_with_a_gpu_test_is_in_one_section() -> None:
    files = [path for name in SECTIONS for path in files_of(name)]
    assert len(files) == len(set(files))
    assert all(path.exists() for path in files)
    mark = ".".join(("mark", "gpu"))  # which must not be in this file
    assert {path for path in TESTS.rglob("test_*.py") if mark in path.read_text("utf-8")} <= set(files)
    assert len(files_of("others")) > 2


def test_ten_minutes_are_enough_for_what_comes_first() -> None:
    budgets = [SECTIONS[name].budget_s for name in DECIDING] + [BENCHES[name].budget_s for name in HEADLINE]
    assert sum(budget + PROCESS_START_S for budget in budgets) <= 10 * 60
    assert list(SECTIONS)[: len(DECIDING)] == list(DECIDING)
    assert list(BENCHES)[: len(HEADLINE)] == list(HEADLINE)


def test_parts() -> None:
    sections = ("a", "b", "c")
    assert names_in(sections, ("a",), None) == sections
    assert names_in(sections, ("a",), [FIRST]) == ("a",)
    assert names_in(sections, ("a",), [REST]) == ("b", "c")
    assert names_in(sections, ("a",), ["c", FIRST]) == ("a", "c")
