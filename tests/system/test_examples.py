"""The examples are tests: each compares with a plain reference and exits non-zero where it differs."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from documents import sections
from repository import ROOT
from run_examples import run_example

from serving.workbench.bench.runtime.overlap import LaneResult, OverlapResult
from serving.workbench.bench.statistics import Interval
from ubatch import Span, SpanKind, StepNote
from ubatch.trace.spans import UNSPLIT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (
            ("wrap_module.py", "--tokens", "512"),
            {"calls: 1 overlapped, not overlapped: {'below_prefill_threshold': 1}": 1},
        ),
        (
            ("wrap_tensor_parallel.py", "--sequences", "4"),
            {"calls: 1 overlapped, not overlapped: {'gradients': 1}": 1, "all-reduce time hidden: ": 1},
        ),
        (
            ("wrap_transformers.py", "--max-new-tokens", "6"),
            {"generated tokens equal, 4 steps overlapped, not overlapped: {}": 2},
        ),
        (
            ("wrap_transformers_parallel.py",),
            {"generated tokens equal": 2, "steps overlapped, not overlapped: {}": 2, "communication hidden: ": 2},
        ),
    ],
)
def test_an_example_prints_that_it_overlapped(words: tuple[str, ...], printed: dict[str, int]) -> None:
    output = run_example(*words)
    assert {line: output.count(line) for line in printed} == printed


@pytest.mark.slow
@pytest.mark.timeout(140)
def test_demo(tmp_path: Path) -> None:
    """Half a minute on 2 cores."""
    output = run_example("demo.py", "--out", str(tmp_path), "--blocks", "2", "--max-tokens", "4", timeout=130)
    step = ("serial, ", "overlapped, ", "  lane 1 computes", "gain  ", "hidden  ", "outputs    equal")
    generation = ("\nA generation: ", "tokens     equal", "steps  ", "How to go on:", "trace.html")
    places = [output.index(part) for part in (*step, *generation)]
    assert places == sorted(places), "the picture comes first"
    assert "128 prompts and 544 new tokens on each rank" in output
    assert "steps      11 of 19 overlapped" in output
    assert re.search(r"  8  prefill steps .* ms off, .* ms on: ", output)
    assert re.search(r"  3  decode steps  .* ms off, .* ms on: ", output)
    assert "  8  decode steps  did not overlap: below_decode_threshold, too few" in output
    assert "def main(self" in output  # legible, and the same on every machine
    assert max(map(len, output.partition("measured")[0].splitlines())) <= 100
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert len({event["args"]["step"] for event in events if event.get("cat") == "step"}) == 2, "serial, and in lanes"
    page = (tmp_path / "trace.html").read_text()
    assert "dispatch" in page
    assert "http" not in page.replace("http://www.w3.org/", "")
    assert "communication hidden in this step" not in page, "of one rank, next to a headline and a table of both"


# -- what the demo says of what it measured ------------------------------------------------------------------------

DEMO = runpy.run_path(str(ROOT / "examples" / "demo.py"))


def step(mode: str, ms: float, reason: str | None = None) -> StepNote:
    return StepNote(1, mode, 128, "mlp_shared_overlap", reason=reason, end=ms / 1e3)


def generated(ms_on: float, declined: str = "below_decode_threshold") -> Any:
    """Four runs each, whose three steps take 10 ms each without overlap; the last one never overlaps."""
    steps = {
        "off": [[step("prefill", 10), step("decode", 10), step("decode", 10)]] * 4,
        "on": [[step("prefill", ms_on), step("decode", ms_on), step("decode", 10, declined)]] * 4,
    }
    seconds = {"off": [0.03] * 4, "on": [(2 * ms_on + 10) / 1e3] * 4}
    return DEMO["Generated"]({"off": [[(1, 2, 3)]], "on": [[(1, 2, 3)]]}, seconds, steps)


def test_the_demo_says_how_much_it_gained(capsys: pytest.CaptureFixture[str]) -> None:
    DEMO["print_generation"](generated(5.0), True)
    output = capsys.readouterr().out
    assert "tokens     equal with overlap on and off" in output
    assert "measured   0.03 s off, 0.02 s on (medians of 4 runs each; gains are medians of pairs)" in output
    assert "gain       1.50x [1.50, 1.50] faster" in output
    assert "hint" not in output
    assert "steps      2 of 3 overlapped" in output
    assert "1  prefill steps 10.0 ms off, 5.0 ms on: 2.00x [2.00, 2.00] faster" in output
    assert "1  decode steps  10.0 ms off, 5.0 ms on: 2.00x [2.00, 2.00] faster" in output
    assert "1  decode steps  did not overlap: below_decode_threshold, too few to gain, fewer than 32 tokens" in output


@pytest.mark.parametrize(
    ("ms_on", "gain"),
    [(20.0, "gain       none, 0.60x [0.60, 0.60]: slower with overlap"), (10.0, "gain       none beyond noise, 1.00x")],
)
def test_the_demo_says_plainly_that_it_gained_nothing(
    ms_on: float, gain: str, capsys: pytest.CaptureFixture[str]
) -> None:
    DEMO["print_generation"](generated(ms_on), True)
    output = capsys.readouterr().out
    assert gain in output
    assert "hint       overlap needs a core per rank" in output
    assert "faster" not in output


def test_the_demo_says_that_tokens_differ_and_names_any_reason(capsys: pytest.CaptureFixture[str]) -> None:
    DEMO["print_generation"](generated(5.0, declined="kv_order"), False)
    output = capsys.readouterr().out
    assert "tokens     DIFFERENT with overlap on and off" in output
    assert "did not overlap: kv_order, see docs/wrapping.md" in output


def test_the_demo_says_of_a_step_what_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """No reason is given for a gain that is none; times better than the bound are called void."""
    spans = [
        Span(SpanKind.COMPUTE, "unsplit", UNSPLIT, 0.0, 0.2, 1),
        Span(SpanKind.COMPUTE, "end", 0, 0.0, 0.1, 2),
        Span(SpanKind.COMPUTE, "end", 1, 0.1, 0.2, 2),
    ]

    def output(ratio: float, void: bool) -> str:
        one, speedup = Interval(1.0, 1.0, 1.0), Interval(ratio, ratio, ratio)
        lane = LaneResult(one, one, one, Interval(0.7, 0.6, 0.8), speedup, one, void)
        arms = {"serial_unsplit": [100.0], "overlapped_2": [100.0 / ratio], "communication_2": [50.0]}
        DEMO["print_step"](OverlapResult(1.0, 1e6, 0.0, {2: lane}, arms, {}), spans, 0.0, 8)
        return capsys.readouterr().out

    faster = output(1.6, False)
    assert "measured   100.0 ms serial, 62.5 ms overlapped (medians of 16 steps; the picture shows two)" in faster
    assert "gain       1.60x [1.60, 1.60] faster\nhidden     70% of the 50.0 ms on the link\nwhy        while" in faster
    assert "void" not in faster
    slower = output(0.8, True)
    assert "gain       none, 0.80x [0.80, 0.80]: slower with overlap\nhint " in slower
    assert "why " not in slower
    assert "void       these times beat what is possible" in slower


def test_the_commands_that_the_demo_ends_with_are_those_of_the_readme() -> None:
    """`test_packaging.py` runs them there."""
    readme = [section for section in sections() if section.document.name == "README.md"]
    shown = {command.text.removesuffix(" &") for section in readme for command in section.commands}
    commands = [line.strip() for line in DEMO["NEXT"].splitlines()[1:] if not line.lstrip().startswith("#")]
    assert len(commands) == 4
    assert [command for command in commands if command not in shown] == []


@pytest.mark.slow
def test_training_starts(tmp_path: Path) -> None:
    run_example("train_tiny_moe.py", "--steps", "1", "--out", str(tmp_path))
    assert (tmp_path / "model.safetensors").stat().st_size < 8_000_000
    assert (tmp_path / "tokenizer.json").is_file()


@pytest.mark.slow
def test_training_a_chat_model_starts(tmp_path: Path) -> None:
    run_example("train_tiny_chat.py", "--steps", "1", "--out", str(tmp_path))
    assert (tmp_path / "model.safetensors").stat().st_size < 2_000_000
    committed = ROOT / "examples" / "models" / "tiny-chat"
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).is_file()
    assert (tmp_path / "tokenizer_config.json").read_text() == (committed / "tokenizer_config.json").read_text()


def test_the_committed_checkpoint_is_small() -> None:
    folder = ROOT / "examples" / "models" / "tiny-moe"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8_000_000
