"""The GPU benchmarks: every section runs here on tiny shapes, and one that breaks leaves the others' results alone.

How they time is shown on a device that is not there.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_graphs import FakeGraphs
from repository import ROOT

from serving.workbench.bench.statistics import Interval
from serving.workbench.gpu import prefill
from serving.workbench.gpu import run as runner
from serving.workbench.gpu.__main__ import main
from serving.workbench.gpu.bench import Bench
from serving.workbench.gpu.decode import count_launches
from serving.workbench.gpu.experts import _kernel_or_eager
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


ON_A_GPU = [pytest.mark.gpu, pytest.mark.timeout(600)]  # everything is compiled and tuned for the first time


def compares_with_a_library(figure: Figure) -> bool:
    return "speed against" in figure.what and figure.goal is None


@pytest.mark.parametrize("name", list(SECTIONS))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=ON_A_GPU)])
@pytest.mark.usefixtures("no_thread_leaks")
def test_every_section_runs(device: str, name: str) -> None:
    options: Any = {"blocks": 1, "graphs": FakeGraphs("cpu")} if device == "cpu" else {"blocks": 2, "budget_s": 300.0}
    section = run_section(name, Bench(torch.device(device), tiny=True, show=False, **options))
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


# ---------------------------------------------- timing, on a device whose clock is turned by what is put on its streams


@dataclass
class Device:
    """Streams with clocks in milliseconds, and what is being captured."""

    ends: dict[str, float] = field(default_factory=lambda: {"main": 0.0})
    stream: str = "main"
    capturing: list[float] | None = None
    host_s: float = 0.0

    def work(self, ms: float) -> Callable[[], None]:
        """Something that launches work of so many milliseconds."""

        def run() -> None:
            if self.capturing is not None:
                self.capturing.append(ms)
            else:
                self.ends[self.stream] += ms

        return run

    def synchronize(self, device: object = None) -> None:
        latest = max(self.ends.values())
        self.ends = dict.fromkeys(self.ends, latest)
        self.host_s = latest / 1e3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """In the place of `torch.cuda`."""
    found = Device()

    class Graph:
        def __init__(self) -> None:
            self.ms: list[float] = []

        def replay(self) -> None:
            found.ends[found.stream] += sum(self.ms)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = found.ends[found.stream]

        def synchronize(self) -> None:
            found.synchronize()

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    @contextmanager
    def graph(into: Graph) -> Iterator[None]:
        found.capturing = into.ms
        yield
        found.capturing = None

    @contextmanager
    def stream(name: str) -> Iterator[None]:
        found.stream = name
        yield
        found.stream = "main"

    def new_stream() -> str:
        found.ends["side"] = max(found.ends.values())
        return "side"

    own = {"CUDAGraph": Graph, "Event": Event, "graph": graph, "stream": stream, "Stream": new_stream}
    for name, value in {**own, "synchronize": found.synchronize}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("serving.workbench.gpu.bench.time.perf_counter", lambda: found.host_s)
    return found


def bench() -> Bench:
    return Bench(torch.device("cuda"))


def test_short_kernels_are_timed_many_in_a_graph(device: Device) -> None:
    arm = bench().kernel(device.work(0.1))
    before = device.ends["main"]
    assert arm() == pytest.approx(0.1)
    assert device.ends["main"] - before == pytest.approx(21 * 0.1), "2 ms at least"
    assert bench().kernel(device.work(30.0))() == pytest.approx(30.0)
    assert bench().kernel(device.work(0.1), capture=False)() == pytest.approx(0.1)


def test_a_peer_that_cannot_be_captured_is_timed_with_its_launches(device: Device) -> None:
    work = device.work(0.5)

    def reads_on_the_host() -> None:
        if device.capturing is not None:
            device.capturing = None
            raise RuntimeError("operation not permitted when stream is capturing")
        work()

    assert _kernel_or_eager(bench(), reads_on_the_host)() == pytest.approx(0.5)


def test_steps_are_replays_and_ceilings_the_median_of_some(device: Device) -> None:
    replay = bench().step(device.work(7.0))
    before = device.ends["main"]
    replay()
    assert device.ends["main"] - before == 7.0
    assert bench()._fastest_s(device.work(4.0)) == pytest.approx(4e-3)


def test_products_beside_copies_and_copies_that_end_too_early(device: Device) -> None:
    alone, beside = prefill._beside_copies(bench(), device.work(1.0), device.work(40.0))
    assert (alone(), beside()) == pytest.approx((1.0, 1.0))

    _, beside = prefill._beside_copies(bench(), device.work(10.0), device.work(4.0))
    with pytest.raises(prefill._EndedEarly, match="the copies ended before the products"):
        beside()


def test_a_slow_down_that_cannot_be_measured_is_missing_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends_early(*_: object) -> Any:
        raise prefill._EndedEarly("the copies ended early")

    section, here, setting = Section("prefill", "Prefill"), Bench(torch.device("cpu"), tiny=True), SimpleNamespace()
    setting.model = setting.step = None
    for name in ("_experts_of_a_half", "_copies"):
        monkeypatch.setattr(prefill, name, lambda *_: list)
    monkeypatch.setattr(here, "interleave", ends_early)
    prefill._add_gemm_slowdown(here, section, setting)  # type: ignore[arg-type]
    (figure,) = section.figures
    assert (figure.value, figure.note) == (None, "the copies ended early")
    assert not section.complete


def test_launches_are_calls_of_the_runtime_and_the_driver() -> None:
    names = [
        "cudaGraphLaunch",
        "cudaLaunchKernel",
        "cuLaunchKernelEx",
        "cudaMemcpyAsync",
        "cudaStreamSynchronize",
        "cudaStreamIsCapturing",
        "cutlass_80_wmma_LaunchKernel_like",
        "Memcpy HtoD (Pinned -> Device)",
        "void at::native::elementwise_kernel<128, 4>",
    ]
    assert count_launches(names) == Counter({"LaunchKernel": 2, "GraphLaunch": 1, "Memcpy": 1})
