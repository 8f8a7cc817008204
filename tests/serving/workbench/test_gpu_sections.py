"""`make gpu`, `make test-gpu` and `make bench-gpu`: rehearsed without a GPU, and what breaks hides nothing else."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT, SUPPORT, TESTS

from serving.workbench.gpu import checks
from serving.workbench.gpu.__main__ import main as bench
from serving.workbench.gpu.checks import SECTIONS, files_of
from serving.workbench.gpu.parts import PARTS, InPart, names_in, write_section
from serving.workbench.gpu.run import SECTIONS as BENCHES
from serving.workbench.gpu.run import SLACK_S

pytestmark = pytest.mark.long

PROCESS_START_S, CHOOSING_A_PYTHON_S = 8, 20
PART_S, LENT_S = 8 * 60, 10 * 60
FOREIGN = (
    *("accelerate", "fastapi", "httpx", "hypothesis", "jinja2", "msgspec", "openai", "prometheus_client", "pydantic"),
    *("pytest_timeout", "tokenizers", "transformers", "uvicorn", "yaml", "zmq"),
)
"""What a machine may lack that has torch, Triton, numpy, tqdm, safetensors and pytest."""


def make(target: str, folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As on a GPU, but for the device."""
    settings = [f"GPU_PYTHON={sys.executable}", "GPU_DEVICE=cpu", f"RESULTS={folder}"]
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
        "test-gpu", tmp_path, "GPU_OPTIONS=--only kernels", PYTHONPATH=str(tmp_path), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    written = sections_of(tmp_path / "gpu-tests.json")
    kernels = written["kernels"]
    assert kernels["counts"] == {"passed": kernels["counts"]["passed"]}, "none is skipped"
    assert kernels["counts"]["passed"] > 8
    assert kernels["environment"]["torch"]
    assert all(each["seconds"] >= 0 for each in kernels["tests"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_is_rehearsed(tmp_path: Path, section: str) -> None:
    done = make("test-gpu", tmp_path, f"GPU_OPTIONS=--only {section}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert list(sections_of(tmp_path / "gpu-tests.json")) == [section]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What `make gpu` asks an interpreter for, which notes it and fails: words behind `python -m`."""
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    folder = tmp_path_factory.mktemp("gpu")
    interpreter = folder / "python"
    interpreter.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\nexit 1\n')
    interpreter.chmod(0o755)
    assert make("gpu", folder, f"GPU_PYTHON={interpreter}").returncode != 0
    return [line.split()[1:] for line in (folder / "asked").read_text().splitlines()]


def test_what_decides_comes_first_and_what_fails_hides_nothing(asked: list[list[str]]) -> None:
    modules = ("serving.workbench.gpu.checks", "serving.workbench.gpu")
    assert [(words[0], words[-2:]) for words in asked] == [
        (module, ["--only", part]) for part in PARTS for module in modules
    ]


@pytest.mark.wide
@pytest.mark.parametrize(("place", "section", "options"), [(0, "kernels", []), (1, "lanes", ["--in-process"])])
def test_what_it_asks_for_runs(
    place: int, section: str, options: list[str], asked: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words as they are, with one section in place of a part; that of the tests is a file that is soon done."""
    module, *words = asked[place]
    monkeypatch.setattr(checks, "SECTIONS", {**SECTIONS, "kernels": replace(SECTIONS["kernels"], files=("sums",))})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it starts sooner
    assert {0: checks.main, 1: bench}[place]([*words, *options, "--only", section]) == 0, module
    written = sections_of(Path(words[words.index("--json") + 1]))
    assert list(written) == [section]
    assert written[section].get("error") is None


@pytest.mark.wide
def test_every_section_has_tests_where_torch_sees_a_gpu(tmp_path: Path) -> None:
    """All files are collected as on a GPU, which some of them look for while they are imported."""
    (tmp_path / "sees_a_gpu.py").write_text("import torch\ntorch.cuda.is_available = lambda: True\n")
    command = [sys.executable, "-m", "pytest", "-p", "sees_a_gpu", "--collect-only", "-q", "-m", "gpu"]
    command += ["-W", "ignore::pytest.PytestConfigWarning"]
    section_of = {str(path.relative_to(ROOT)): name for name in SECTIONS for path in files_of(name)}
    settings = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TRITON_INTERPRET": "0",
    }
    done = subprocess.run(
        [*command, *section_of],
        **{"cwd": ROOT, "env": os.environ | settings, "capture_output": True, "text": True, "timeout": 100},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    found = {section_of[line.partition("::")[0]] for line in done.stdout.splitlines() if "::" in line}
    assert found == set(SECTIONS)


# ------------------------------------------------------------------------------------------------- packages that lack

SETTINGS = "[pytest]\nmarkers =\n    gpu: needs a CUDA GPU; skipped where there is none\n"
LACKING = """
import pytest
import surely_not_installed

@getattr(pytest.mark, "gpu")
def test_something() -> None:
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["-m", "gpu"], ["[1] test_lacking.py:0: needs surely_not_installed, which this Python lacks", "1 error"]),
        ([], ["2 errors"]),
    ],
)
def test_gpu_tests_that_need_a_missing_package_are_skipped_by_name(
    words: list[str], wanted: list[str], tmp_path: Path
) -> None:
    """But not those that lack what should have been in this tree; and without that selection both are errors."""
    shutil.copy(TESTS / "conftest.py", tmp_path)
    for name, text in {
        "pytest.ini": SETTINGS,
        "test_lacking.py": LACKING,
        "test_broken.py": "import conftest.not_there\n",
    }.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode in (1, 2), done.stdout  # 2 if pytest stops at errors of collection
    assert [part for part in (*wanted, "ERROR test_broken.py") if part not in done.stdout] == []


# ------------------------------------------------------------------------------------------------------ one that breaks

BREAKING = {
    "crash": "import os\ndef test_before(): pass\ndef test_crash(): os._exit(9)\n",
    "hang": "import time\ndef test_before(): pass\ndef test_hang(): time.sleep(100)\n",
    "wrong": "def test_wrong(): assert 1 == 2\ndef test_after(): pass\n",
    "unreadable": "import nothing_of_that_name.at_all\n",
    "no_syntax": "def\n",
    "good": "def test_good(): pass\n",
}


def fails(tests: dict[str, str], sections: dict[str, checks.Section], jobs: str, folder: Path) -> dict[str, Any]:
    """What is written of sections over these files, of which some break."""
    for name, text in tests.items():
        (folder / f"test_{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: long\n")
    file = folder / "results.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "SECTIONS", sections)
        patch.setattr(checks, "files_of", lambda name: [folder / f"test_{each}.py" for each in sections[name].files])
        patch.setattr(checks, "_environment", dict)
        assert checks.main(["--device", "cpu", "--jobs", jobs, "--json", str(file)]) == 1
    return sections_of(file)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "6"])
def test_a_section_that_breaks_loses_nothing_of_itself_or_of_others(
    jobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sections = {name: checks.Section((name,), 4.0 if name == "hang" else 20.0, "first") for name in BREAKING}
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it starts sooner
    written = fails(BREAKING, sections, jobs, tmp_path)
    assert {name: (found["status"], found["counts"]) for name, found in written.items()} == {
        "crash": (9, {"passed": 1}),
        "hang": (124, {"passed": 1}),
        "wrong": (1, {"failed": 1, "passed": 1}),
        "unreadable": (2, {"failed": 1}),
        "no_syntax": (2, {"failed": 1}),
        "good": (0, {"passed": 1}),
    }
    assert "assert 1 == 2" in written["wrong"]["tests"][0]["error"]
    assert "nothing_of_that_name" in written["unreadable"]["tests"][0]["error"]
    printed = capfd.readouterr()
    assert "==> hang: out of time (12 s): 1 passed in " in printed.out
    [failed] = re.findall(r"^Not everything ran and passed: (.*)\.$", printed.err, re.MULTILINE)
    assert sorted(failed.split(", ")) == sorted(BREAKING.keys() - {"good"})


@pytest.mark.wide
def test_a_section_of_several_processes_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    many = "import pytest\n@pytest.mark.parametrize('n', range(9))\ndef test_good(n): assert n != 5\n"
    tests = {"many": many, "unreadable": BREAKING["unreadable"]}
    for name in [each for each in os.environ if each.startswith("PYTEST")]:
        monkeypatch.delenv(name)
    section = checks.Section(tuple(tests), 60.0, "first", processes=2)
    [found] = fails(tests, {"many": section}, "4", tmp_path).values()
    assert found["counts"] == {"passed": 8, "failed": 2}
    assert len({each["test"] for each in found["tests"]}) == 10
    assert "2 workers" in capfd.readouterr().out


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
    monkeypatch.setattr(checks, "_run_all", lambda names, device, jobs: [(name, skipped) for name in names])
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


@pytest.mark.parametrize("part", PARTS)
def test_a_part_takes_eight_minutes_at_most(part: str) -> None:
    """One section after the other, each as long as it may; and ten if the benchmarks hang."""
    tests, benches = names_in(SECTIONS, [part]), names_in(BENCHES, [part])
    budgets = [SECTIONS[name].budget_s for name in tests] + [BENCHES[name].budget_s for name in benches]
    seconds = CHOOSING_A_PYTHON_S + sum(budget + PROCESS_START_S for budget in budgets)
    assert tests
    assert benches
    assert seconds <= PART_S
    assert seconds + SLACK_S * len(benches) <= LENT_S


def test_every_section_is_in_a_part_and_the_headline_in_the_first() -> None:
    for sections in (SECTIONS, BENCHES):
        assert sorted(name for part in PARTS for name in names_in(sections, [part])) == sorted(sections)
    assert names_in(SECTIONS, ["first"]) == ("streams", "capture", "kernels")
    assert names_in(BENCHES, ["first"]) == ("prefill", "moe-decode")


def test_sections_are_chosen_by_name_and_by_part() -> None:
    parts = {"a": "first", "b": "rest-1", "c": "rest-1"}
    sections: dict[str, InPart] = {name: checks.Section((), 1.0, part) for name, part in parts.items()}
    assert names_in(sections, None) == ("a", "b", "c")
    assert names_in(sections, ["rest-1"]) == ("b", "c")
    assert names_in(sections, ["c", "first"]) == ("a", "c")


# -------------------------------------------------------------------------------------------------------- side by side


@pytest.mark.parametrize(
    ("jobs", "begun"),
    [
        (1, ["+a", "-a", "+lone", "-lone", "+b", "-b", "+c", "-c", "+d", "-d"]),
        (2, ["+a", "-a", "+lone", "-lone", "+b", "+c", "-b", "+d", "-c", "-d"]),
        (9, ["+a", "-a", "+lone", "-lone", "+b", "+c", "+d", "-b", "-c", "-d"]),
    ],
)
def test_as_many_run_as_there_are_jobs_and_some_alone(
    jobs: int, begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that began first end first, one at each look."""
    seen: list[str] = []
    running: list[str] = []

    class Running:
        def __init__(self, name: str, device: str, most: int) -> None:
            assert most == jobs
            self.name = name
            seen.append(f"+{name}")
            running.append(name)

        @property
        def over(self) -> bool:
            return running[0] == self.name

        def results(self) -> dict[str, Any]:
            seen.append(f"-{self.name}")
            running.remove(self.name)
            return {"outcome": "done", "seconds": 0.0}

        def end(self) -> None:
            seen.append(f"killed {self.name}")

    sections = {name: checks.Section((), 1.0, "first", alone=name == "lone") for name in ("a", "lone", "b", "c", "d")}
    monkeypatch.setattr(checks, "SECTIONS", sections)
    monkeypatch.setattr(checks, "_Running", Running)
    assert [name for name, _ in checks._run_all(tuple(sections), "cpu", jobs)] == list(sections)
    assert seen == begun


@pytest.mark.parametrize(("processors", "jobs"), [(2, 1), (7, 1), (8, 4), (16, 8)])
def test_few_processors_run_one_at_a_time(processors: int, jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(processors)))
    assert checks._default_jobs() == jobs
