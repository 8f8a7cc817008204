"""`ubatch bench step`: kinds of work add up to the step, also of repeated kernel calls, and the functions come back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from c_kernels import needs_c
from repository import TINY_MOE

from model_runner.decoder.repeated import RepeatedLayers
from serving import LLM
from serving.cli import main
from serving.workbench.bench.generate import completions
from serving.workbench.bench.server import step, step_times
from serving.workbench.bench.server.step import Options, run
from serving.workbench.bench.server.step_times import _BOUNDARIES, Kind, Stopwatch

pytestmark = pytest.mark.long

PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
OF_LAYERS = {Kind.ATTENTION, Kind.PROJECTIONS, Kind.EXPERTS, Kind.ROUTER, Kind.SMALL}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: now[0])
    return now


def test_a_moment_counts_once(clock: list[float]) -> None:
    """For what began last; the gate's product is the router's, and the experts' own is not the projections'."""
    watch = Stopwatch()

    def spend(seconds: float, *inner: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            for each in inner:
                each()
            clock[0] += seconds

        return run

    product = watch.timed(Kind.PROJECTIONS, spend(1.0))
    gate = watch.timed(Kind.ROUTER, spend(2.0, product))
    experts = watch.timed(Kind.EXPERTS, spend(4.0, product))
    spend(8.0, gate, experts, product)()
    watch._charge()
    expected = {Kind.ROUTER: 3.0, Kind.EXPERTS: 4.0, Kind.PROJECTIONS: 2.0, Kind.OTHER: 8.0}
    assert {kind: seconds for kind, seconds in watch._seconds.items() if seconds} == expected


@needs_c
@pytest.mark.parametrize("backend", ["native", "grouped"])
def test_every_kind_of_work_is_found(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps whose recorded kernel calls are repeated, too. Afterwards all functions are what they were."""
    models: list[RepeatedLayers] = []
    make = RepeatedLayers.__init__
    monkeypatch.setattr(RepeatedLayers, "__init__", lambda self, *args: models.append(self) or make(self, *args))
    before = [vars(owner)[name] for _, owner, names in _BOUNDARIES for name in names]
    options: dict[str, Any] = {"moe_backend": backend, "dtype": "float32", "skip_tokenizer_init": True}
    with LLM(TINY_MOE, **options) as llm:
        watch = Stopwatch()
        with watch.steps(split=True) as steps:
            completions(llm, PROMPTS, 10)
        assert sum(each.repetitions for each in models) == (6 if backend == "native" else 0)
        with watch.steps(split=False) as plain:
            completions(llm, PROMPTS, 3)
    assert [vars(owner)[name] for _, owner, names in _BOUNDARIES for name in names] == before
    assert len(steps) == 10
    for each in steps:
        assert all(each[kind] > 0 for kind in Kind), each
    assert len(plain) == 3
    repeated = {kind for each in plain for kind, seconds in each.items() if seconds}
    assert repeated == ({Kind.OTHER} | OF_LAYERS if backend == "native" else {Kind.OTHER})  # recorded with clocks


@contextmanager
def _in_this_process(kernels: str, model: Path, options: Options) -> Iterator[Any]:
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


def check(report: dict[str, Any], arms: list[str]) -> None:
    for name in ("decode", "prefill"):
        assert list(report["results"][name]) == arms
        for figures in report["results"][name].values():
            assert sum(figures["share"].values()) == pytest.approx(1.0)
            assert sum(figures["parts_ms"].values()) == pytest.approx(figures["clocked_ms"]["median"])
            assert (figures["over_torch"] is not None) == ("torch float32" in arms)


def test_the_table_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(step, "_process", _in_this_process)
    file = tmp_path / "step.json"
    small = {"requests": 3, "prompt": 5, "steps": 4, "blocks": 2, "dtypes": ("float32",)}
    assert run(Options(model=TINY_MOE, json_file=file, **small)) == 0
    check(json.loads(file.read_text()), ["native float32"])
    out = capsys.readouterr().out
    assert "a decode step of 3 requests, 4 after 5 tokens" in out
    assert "a prefill of 15 tokens, 3 prompts" in out
    assert all(f"\n  {kind}  " in out for kind in Kind)


def test_a_cache_without_room_for_all_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step, "_process", _in_this_process)
    small = ["--requests", "4", "--prompt", "16", "--steps", "4", "--blocks", "2", "--dtypes", "float32"]
    assert main(["bench", "step", "--model", str(TINY_MOE), *small, "--kv-cache-memory", "320K"]) == 2
    assert "Raise --kv-cache-memory" in capsys.readouterr().err


@pytest.mark.slow
@needs_c
def test_torchs_kernels_run_in_a_process_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    small = {"requests": 3, "prompt": 5, "steps": 4, "blocks": 2, "dtypes": ("float32",)}
    assert run(Options(model=TINY_MOE, json_file=file, **small)) == 0
    check(json.loads(file.read_text()), ["torch float32", "native float32"])
