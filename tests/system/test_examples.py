"""The examples are tests: each compares with a plain reference and exits non-zero where it differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from repository import ROOT
from run_examples import run_example


@pytest.mark.slow
def test_wrap_module() -> None:
    output = run_example("wrap_module.py", "--tokens", "512")
    assert "calls: 1 overlapped, not overlapped: {'below_prefill_threshold': 1}" in output


@pytest.mark.slow
def test_wrap_tensor_parallel() -> None:
    output = run_example("wrap_tensor_parallel.py", "--sequences", "4")
    assert "calls: 1 overlapped, not overlapped: {'gradients': 1}" in output
    assert "all-reduce time hidden: " in output


@pytest.mark.slow
def test_wrap_transformers() -> None:
    output = run_example("wrap_transformers.py", "--max-new-tokens", "6")
    assert output.count("generated tokens equal, 4 steps overlapped, not overlapped: {}") == 2


@pytest.mark.slow
def test_wrap_transformers_parallel() -> None:
    output = run_example("wrap_transformers_parallel.py")
    assert output.count("generated tokens equal") == 2
    assert output.count("steps overlapped, not overlapped: {}") == 2
    assert output.count("communication hidden: ") == 2


@pytest.mark.slow
@pytest.mark.timeout(140)
def test_demo(tmp_path: Path) -> None:
    output = run_example("demo.py", "--out", str(tmp_path), "--blocks", "2", "--max-tokens", "4", timeout=160)
    assert "tokens with overlap on and off: equal (192 generated)" in output
    assert "def main(self" in output  # legible, and the same on every machine
    assert "below_decode_threshold" in output
    for figure in ("efficiency", "schedule_efficiency", "hidden", "speedup", "serial_unsplit", "overlapped_2"):
        assert figure in output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    page = (tmp_path / "trace.html").read_text()
    assert "dispatch" in page
    assert "http" not in page.replace("http://www.w3.org/", "")
    assert "communication hidden in this step" not in page, "of one rank, beside a headline and a table of both"


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
