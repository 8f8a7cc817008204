"""The GPU benchmarks: every section runs here on tiny shapes, and one that breaks leaves the others' results alone."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_graphs import FakeGraphs
from repository import ROOT

from serving.workbench.bench.statistics import Interval
from serving.workbench.gpu import run as runner
from serving.workbench.gpu.__main__ import main
from serving.workbench.gpu.bench import Bench
from serving.workbench.gpu.prefill import figures_of
from serving.workbench.gpu.report import Figure, Section, as_markdown, as_text
from serving.workbench.gpu.run import SECTIONS, Options, Plan, run, run_section

pytestmark = pytest.mark.long

RESULTS = ROOT / "benchmarks" / "results"
FIGURES = {
    "moe-decode": ["copy bandwidth", "4 tokens: share of the bandwidth floor", "4 tokens: speed against torch._group"],
    "moe-prefill": ["matrix peak", "8 tokens: share of the matrix peak"],
    "linear": ["2 of 20 tokens: time"],
    "attention": ["batch 2: share of the copy bandwidth"],
    "prefill": [
        "GEMM slow-down beside copies",
        "communication 1x compute: hidden",
        "communication 1x compute: efficiency",
        "communication 1x compute: schedule_efficiency",
        "communication 1x compute: speed-up",
    ],
    "sms": ["least slow-down", "claimed / dealt, alone", "claimed beside: slow-down", "reserved beside: slow-down"],
    "decode": ["plain: CPU of replay()", "plain: CPU of a whole step", "overlapped: CPU of replay()"],
    "lanes": ["hand-offs per layer", "lanes' cost per hand-off, launching"],
}


@pytest.mark.parametrize("name", list(SECTIONS))
@pytest.mark.usefixtures("no_thread_leaks")
def test_every_section_runs(name: str) -> None:
    section = run_section(name, Bench(torch.device("cpu"), tiny=True, blocks=1, graphs=FakeGraphs("cpu"), show=False))
    check(section)


@pytest.mark.gpu
@pytest.mark.timeout(600)  # everything is compiled and tuned for the first time
@pytest.mark.parametrize("name", list(SECTIONS))
@pytest.mark.usefixtures("no_thread_leaks")
def test_every_section_runs_on_a_gpu(name: str) -> None:
    section = run_section(name, Bench(torch.device("cuda", 0), tiny=True, blocks=2, budget_s=300.0, show=False))
    check(section)


def compares_with_a_library(figure: Figure) -> bool:
    return "speed against" in figure.what and figure.goal is None


def check(section: Section) -> None:
    assert section.error is None
    for wanted in FIGURES[section.name]:
        assert any(figure.what.startswith(wanted) for figure in section.figures), wanted
    # Without a device nothing is launched, and tiny shapes prove nothing: figures may be void. Other libraries need not
    # be there. Nothing else may lack.
    lacking = [figure for figure in section.figures if figure.value is None and not compares_with_a_library(figure)]
    assert all("void" in each.note or "launches" in each.what or "too slow" in each.note for each in lacking)
    assert all(min(map(min, arms.values())) > 0 for arms in section.arms_ms.values())


@pytest.mark.slow
def test_the_command_line_writes_a_smoke_file_that_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a process per section, as `make bench-gpu` does it."""
    file = tmp_path / "gpu.json"
    before = sorted(RESULTS.iterdir())
    arguments = ["--device", "cpu", "--tiny", "--blocks", "1", "--only", "moe-prefill"]
    assert main([*arguments, "--json", str(file), "--markdown", str(tmp_path / "gpu.md")]) == 0
    written = json.loads(file.read_text())
    assert (written["device"], written["smoke"], list(written["sections"])) == ("cpu", True, ["moe-prefill"])
    assert written["sections"]["moe-prefill"]["environment"]["torch"] == torch.__version__
    assert "Fused MoE, prefill sizes" in capfd.readouterr().out
    assert "| 8 tokens: share of the matrix peak |" in (tmp_path / "gpu.md").read_text()
    assert sorted(RESULTS.iterdir()) == before, "a smoke test writes only where it is told to"


def test_one_section_that_breaks_loses_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = __name__
    plans = {
        "good": Plan("Good", f"{here}:_good", 60.0, "first"),
        "bad": Plan("Bad", f"{here}:_bad", 60.0, "first"),
        "late": Plan("Late", f"{here}:_late", 0.0, "first"),
    }
    monkeypatch.setattr(runner, "SECTIONS", plans)
    file, tables = tmp_path / "gpu.json", tmp_path / "gpu.md"
    options = Options(tuple(plans), "cpu", tiny=True, json_file=file, markdown_file=tables)
    assert run(options, in_process=True) == 1
    written = json.loads(file.read_text())["sections"]
    assert [each["error"] for each in written.values()] == [
        None,
        "ValueError: planted",
        f"out of time before the second row: {written['late']['error'].split(': ')[1]}",
    ]
    assert [[figure["what"] for figure in each["figures"]] for each in written.values()] == [["a"], ["b"], ["c"]]
    printed = capsys.readouterr()
    assert "FAILED: ValueError: planted" in printed.out
    assert "Not every figure could be measured" in printed.err

    later = Options(("good",), "cpu", tiny=True, json_file=file, markdown_file=tables)
    assert run(later, in_process=True) == 0
    assert list(json.loads(file.read_text())["sections"]) == ["good", "bad", "late"], "the others' results are kept"
    assert tables.read_text().count("## ") == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda old: old.pop("name"),
        lambda old: old["figures"][0].update(goal={"value": 0.8, "at_most": False}),
        lambda old: old["figures"][0].update(goal=[0.8, False]),
        lambda old: old["figures"][0].pop("note"),
        lambda old: old.update(figures={"a": 1.0}),
    ],
)
def test_a_file_of_an_earlier_version_is_refused_before_anything_runs(
    change: Callable[[Any], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = Section("lanes", "Lanes")
    section.add("a", 0.9, at_least=0.8)
    old = section.as_json()
    change(old)
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"device": "cpu", "smoke": True, "sections": {"lanes": old}}))
    before = file.read_text()
    assert main(["--device", "cpu", "--tiny", "--only", "attention", "--json", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"{file}: lanes: a section of an earlier version (")
    assert printed.err.endswith(". Delete the file, or give another one.\n")
    assert (printed.out, file.read_text()) == ("", before)


def _good(bench: Bench, section: Section) -> None:
    section.add("a", Interval(2.0, 1.0, 3.0), "ms", at_least=1.0)


def _bad(bench: Bench, section: Section) -> None:
    section.add("b", 1.0)
    raise ValueError("planted")


def _late(bench: Bench, section: Section) -> None:
    section.add("c", 1.0)
    bench.check_time("the second row")


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (subprocess.CompletedProcess([], -11), "its process ended with status -11"),
        (subprocess.TimeoutExpired([], 80.0), "it took more than 80 s, and was ended"),
    ],
)
def test_a_section_whose_process_dies_or_hangs_is_a_result(
    outcome: object, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def end(command: list[str], *, timeout: float, **settings: object) -> object:
        commands.append(command)
        assert timeout > SECTIONS["lanes"].budget_s
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": end}))
    section = runner._run_apart(Options(device="cpu", tiny=True), "lanes")
    assert section.error == error
    assert not section.complete
    assert commands[0][1:7] == ["-m", "serving.workbench.gpu", "--only", "lanes", "--in-process", "--json"]


def test_a_machine_without_a_gpu_is_told_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 1
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    assert main(["--device", "cpu"]) == 2
    assert "--device cpu needs --tiny" in capsys.readouterr().err


def test_verdicts_and_tables() -> None:
    section = Section("x", "A title", environment={"device": "H200", "driver": "1", "torch": "2", "triton": "3"})
    section.add("above", 0.9, at_least=0.8)
    section.add("below", Interval(0.7, 0.6, 0.9), at_least=0.8)
    section.add("short", 25.0, "us", at_most=30)
    section.add("not there", None, at_most=30, note="because")
    section.add("plain", 3, "ms")
    assert [figure.verdict for figure in section.figures] == ["met", "missed", "met", "", ""]
    assert not section.complete
    again = Section.from_json(json.loads(json.dumps(section.as_json(), default=vars)))
    assert again == section
    lines = as_text(section, judge=True).splitlines()
    assert lines[2].split() == ["above", "0.9", ">=", "0.8", "met"]
    assert lines[5].split() == ["not", "there", "not", "measured", "(because)", "<=", "30"]
    assert "missed" not in as_text(section, judge=False)
    assert "| below | 0.7 [0.6, 0.9] | >= 0.8 | missed |" in as_markdown([section], judge=True)


def test_figures_of_a_perfect_overlap_and_of_none() -> None:
    arms = {"split_compute": [10.0], "communication": [8.0], "serial": [19.0], "split_serial": [18.0]}
    perfect = figures_of({**arms, "overlapped": [10.0]}, ideal_ms=9.0)
    assert {name: figure.median for name, figure in perfect.items()} == {
        "hidden": 1.0,
        "efficiency": 1.0,
        "schedule_efficiency": 0.9,
        "speed-up": 1.8,
    }
    none = figures_of({**arms, "overlapped": [18.0]}, ideal_ms=9.0)
    assert none["hidden"].median == 0.0
    assert none["speed-up"].median == 1.0


def test_the_results_folder_says_what_is_measured() -> None:
    """The page says that nothing was measured, or there are tables of a real GPU."""
    file = RESULTS / "gpu.json"
    if not file.exists():
        assert "not yet measured" in (RESULTS / "README.md").read_text(encoding="utf-8")
    else:
        written = json.loads(file.read_text())
        assert written["device"] == "cuda"
        assert "smoke" not in written
