"""`ubatch bench` commands whose arms are steps: each runs small, prints, and writes its raw arms."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from c_kernels import needs_c
from dense_checkpoint import SMALL_MOE
from repository import TINY_MOE

from model_runner import make_random_checkpoint
from serving.cli import main
from serving.workbench.bench.runtime import experts
from serving.workbench.bench.server import step
from serving.workbench.planning.measured import gates_of_results
from ubatch.kernels.c_jit import why_not_c

pytestmark = pytest.mark.long

TINY = str(TINY_MOE)
STEP = ["--model", TINY, "--requests", "3", "--prompt", "5", "--steps", "4", "--blocks", "2", "--dtypes", "float32"]
Report = Mapping[str, Any]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """What is measured may take all cores; the tests that follow shall not."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"_EXPERTS": 4, "_HIDDEN": 32, "_INTERMEDIATE": 16, "_TOP_K": 2, "_LAYERS": 2}.items():
        monkeypatch.setattr(experts, name, size)


@contextmanager
def _in_this_process(kernels: str, model: Path, options: step.Options) -> Iterator[Any]:
    if kernels == "torch":
        yield None  # the C kernels of this process are loaded
        return
    step._begin(kernels, model, options)
    try:
        yield step._visit
    finally:
        for dtype in options.dtypes:
            for clocked in (False, True):
                step._engine(dtype, clocked).close()
        step._engine.cache_clear()
        step._of_process.clear()


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_process", _in_this_process)


# -- what each has to write --------------------------------------------------------------------------------------------


def ordered(figure: Report) -> bool:
    return bool(figure["low"] <= figure["median"] <= figure["high"])


def check_experts(report: Report, file: Path) -> None:
    for tokens in ("3", "9"):
        found = report["results"][tokens]
        for dtype in ("float32", "bfloat16"):
            assert (f"native {dtype}" in found) == (why_not_c() is None)
            assert found[f"grouped {dtype}"]["over_grouped"]["median"] == 1.0
        assert all(len(arm) == 2 for arm in report["arms_ms"][tokens].values())


def check_overlap(report: Report, file: Path) -> None:
    """How near the prediction comes is the machine's to say; no step computed for longer than it took."""
    (gate,), (link,) = gates_of_results(file), report["links"]
    assert gate.predicted > 0
    assert gate.distance < 4.0
    for own, wall in zip(link["arms_ms"]["own_compute_2"], link["arms_ms"]["overlapped_2"], strict=True):
        assert 0 < own <= 1.01 * wall


def check_step(report: Report, file: Path) -> None:
    arms = ["torch float32", "native float32"] if "torch float32" in report["arms_ms"]["decode"] else ["native float32"]
    for name in ("decode", "prefill"):
        assert list(report["results"][name]) == arms
        for figures in report["results"][name].values():
            assert sum(figures["share"].values()) == pytest.approx(1.0)
            assert sum(figures["parts_ms"].values()) == pytest.approx(figures["clocked_ms"]["median"])
            assert (figures["over_torch"] is not None) == ("torch float32" in arms)


def check_structured(report: Report, file: Path) -> None:
    found = report["results"]
    assert list(found["step_ms"]) == list(report["arms_ms"]) == ["free", "one", "all"]
    assert all(len(values) == 2 for values in report["arms_ms"].values())
    assert found["tokenizer_ms"] > 0
    names = ("all_over_free", "one_over_free", "device_all_over_free", "device_one_over_free")
    for name in (*names, "mask_us", "advance_us", "compile_ms"):
        assert ordered(found[name])
        assert found[name]["median"] > 0


def check_auto(report: Report, file: Path) -> None:
    assert [link["ratio"] for link in report["links"]] == [0.0, 4.0]
    assert report["links"][0]["bytes_per_s"] is None
    for link in report["links"]:
        steps = len(link["load"])
        assert set(link["seconds"]) == {"serial", "two-lanes", "three-lanes", "single-batch", "two-by-two", "dbo"}
        assert {len(values) for values in (link["ran"], *link["seconds"].values())} == {steps}
        for figure, arms in (("against_serial", ["serial"]), ("against_best", link["seconds"])):
            least = sum(min(link["seconds"][arm][number] for arm in arms) for number in range(steps))
            assert link[figure]["median"] >= least / sum(link["seconds"]["dbo"]) - 1e-3  # written to microseconds
        for arm, seconds in link["seconds"].items():
            assert all(0 < forward < whole for forward, whole in zip(link["forwards"][arm], seconds, strict=True))
        names = ("against_serial", "against_best", "pooled_serial", "pooled_best")
        assert all(ordered(link[name]) for name in names)
    fast, slow = (sum(link["seconds"]["serial"]) for link in report["links"])
    assert slow > 1.5 * fast  # the link is there


def check_transformers(report: Report, file: Path) -> None:
    assert report["over_not_wrapped"]["median"] > 0
    assert report["arms_ms"].keys() >= {"compute_unsplit", "serial_unsplit", "serial_2", "overlapped_2"}
    assert all(len(block_means) == 2 for block_means in report["arms_ms"].values())


def check_fairness(report: Report, file: Path) -> None:
    arms = report["arms"]
    assert [(arm["limit"], arm["dbo"]) for arm in arms] == [("off", False), ("64", False), ("off", True), ("64", True)]
    for arm in arms:
        assert len(arm["rounds"]) == 4
        assert ordered(arm["stretch"])
        assert arm["dbo"] or not arm["overlapped"]
    assert arms[3]["overlapped"] < arms[2]["overlapped"]  # 64 tokens are too few; when streams have ended, more come
    assert arms[0]["throughput"]["median"] == arms[2]["throughput"]["median"] == 1.0


@dataclass(frozen=True)
class Run:
    """A command's words, what it prints, and a check of what it writes. `MODEL` is a checkpoint of a few weights."""

    words: Sequence[str]
    prints: Sequence[str]
    check: Callable[[Report, Path], None]
    fixture: str | None = None
    statuses: Sequence[int] = (0,)
    marks: Sequence[pytest.MarkDecorator] = ()


PROMPTS = ["--sequences", "4", "--sequence-length", "16", "--blocks", "2"]
SLOW = pytest.mark.slow
NEEDS_LLGUIDANCE = pytest.mark.skipif(
    find_spec("llguidance") is None, reason="llguidance is not installed; `make setup` installs it"
)
VOID = (0, 1)  # of two short blocks times may well be better than the bound
OVERLAP = ["overlap", "--model", "MODEL", *PROMPTS, "--lanes", "2", "--ratios", "1"]
AUTO = ["auto", TINY, "--steps", "40", "--ratios", "0", "4", "--compared", "0.5", "--max-decode-tokens", "16"]
FAIR = ["fairness", TINY, "--streams", "4", "--output-len", "60", "--prompts", "3", "--limits", "64", "--rounds", "2"]
STRUCTURED = ["--requests", "3", "--prompt", "5", "--tokens", "6", "--blocks", "2", "--device-ms", "1"]
STEPS = ["a decode step of 3 requests, 4 after 5 tokens", "a prefill of 15 tokens, 3 prompts"]
RUNS = {
    "experts": Run(
        ["experts", "--tokens", "3", "9", "--threads", "1", "--blocks", "2"],
        *(["9 tokens, grouped bfloat16"], check_experts, "small_layers"),
    ),
    "overlap": Run(OVERLAP, ["in float32, 2 ranks, each with 4 prompts", "of_bound"], check_overlap, statuses=VOID),
    "step": Run(["step", *STEP], [*STEPS, *(f"\n  {kind}  " for kind in step.Kind)], check_step, "one_process"),
    "step, torch's kernels in a process of their own": Run(["step", *STEP], STEPS, check_step, marks=(SLOW, needs_c)),
    "structured": Run(
        ["structured", "--model", TINY, *STRUCTURED], ["3 requests of 5 tokens, 6 new"], check_structured
    ),
    "structured, with a vocabulary": Run(
        ["structured", "--layers", "2", "--vocabulary", "9000", *STRUCTURED],
        *(["compiling a new text"], check_structured, None, (0,), (SLOW, NEEDS_LLGUIDANCE)),
    ),
    "auto": Run([*AUTO, "--max-prefill-tokens", "64"], ["best fixed, decode"], check_auto, marks=(SLOW,)),
    "transformers": Run(
        ["transformers", "--model", "MODEL", *PROMPTS, "--latency-us", "0"],
        *(["wrapped, over not wrapped"], check_transformers, None, VOID, (SLOW,)),
    ),
    "fairness": Run(FAIR, ["4 streams on 2 ranks, 3 prompts of 900 tokens"], check_fairness, marks=(SLOW,)),
}


@pytest.mark.timeout(140)
@pytest.mark.parametrize("run", [pytest.param(run, marks=run.marks, id=name) for name, run in RUNS.items()])
def test_a_command_runs_prints_and_writes(
    run: Run, tmp_path: Path, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    if run.fixture is not None:
        request.getfixturevalue(run.fixture)
    model = make_random_checkpoint(tmp_path / "model", SMALL_MOE) if "MODEL" in run.words else None
    file = tmp_path / "figures.json"
    words = [str(model) if word == "MODEL" else word for word in run.words]
    assert main(["bench", *words, "--json", str(file)]) in run.statuses
    printed = capfd.readouterr().out
    assert [part for part in run.prints if part not in printed] == []
    report = json.loads(file.read_text())
    assert {"environment", "measured", "options"} < report.keys()
    run.check(report, file)


def test_experts_without_c_say_what_is_left_out(
    small_layers: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experts, "why_not_c", lambda: "no C compiler is installed.")
    assert main(["bench", "experts", "--tokens", "3", "--dtypes", "bfloat16", "--threads", "1", "--blocks", "2"]) == 0
    out = capsys.readouterr().out
    assert "native is left out: no C compiler is installed." in out
    assert "tokens, native" not in out
