"""The examples are tests: each compares with a plain reference and exits non-zero where it differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 200.0

pytestmark = pytest.mark.timeout(240)


COMMANDS = {
    "test_training_starts": ["train_tiny_moe.py", "--steps", "1", "--out", "trained"],
    "test_wrap_module": ["wrap_module.py", "--tokens", "512"],
    "test_wrap_tensor_parallel": ["wrap_tensor_parallel.py", "--sequences", "4"],
    "test_wrap_transformers": ["wrap_transformers.py", "--max-new-tokens", "6"],
    "test_demo": ["demo.py", "--out", "demo", "--blocks", "2", "--max-tokens", "4"],
}


class Example:
    """An example that has started; its files are in `folder`."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.folder = folder
        self._files = [(folder / f"{name}.{kind}").open("w+") for kind in ("out", "err")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::ResourceWarning"}
        command = [sys.executable, str(ROOT / "examples" / name), *arguments]
        out, err = self._files
        self._process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err)

    def output(self, timeout: float) -> str:
        """What it prints, once it has ended; its standard error where it fails."""
        self._process.wait(timeout)
        for file in self._files:
            file.seek(0)
        out, err = (file.read() for file in self._files)
        assert self._process.returncode == 0, out + err
        return out

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for file in self._files:
            file.close()


def run_example(folder: Path, name: str, *arguments: str, timeout: float = 100.0) -> str:
    """What an example prints that runs in `folder`; its standard error where it fails."""
    example = Example(folder, name, *arguments)
    try:
        return example.output(timeout)
    finally:
        example.close()


@pytest.fixture(scope="module")
def examples(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Example]]:
    """Those of the tests that were chosen, by test. They run at once: most of the time each imports with one core."""
    chosen = {item.name for item in request.session.items if item.path == request.path}
    folder = tmp_path_factory.mktemp("examples")
    started = {name: Example(folder, *words) for name, words in COMMANDS.items() if name in chosen}
    yield started
    for example in started.values():
        example.close()


@pytest.fixture
def example(request: pytest.FixtureRequest, examples: dict[str, Example]) -> Example:
    """That of this test."""
    return examples[request.node.name]


def test_wrap_module(example: Example) -> None:
    output = example.output(PATIENCE_S)
    assert "calls: 1 overlapped, not overlapped: {'below_prefill_threshold': 1}" in output


def test_wrap_tensor_parallel(example: Example) -> None:
    output = example.output(PATIENCE_S)
    assert "calls: 1 overlapped, not overlapped: {'gradients': 1}" in output
    assert "all-reduce time hidden: " in output


def test_wrap_transformers(example: Example) -> None:
    output = example.output(PATIENCE_S)
    assert output.count("generated tokens equal, 7 steps overlapped, not overlapped: {}") == 2


def test_demo(example: Example) -> None:
    output = example.output(PATIENCE_S)
    assert "tokens with overlap on and off: equal (192 generated)" in output
    assert "def main(self" in output  # legible, and the same on every machine
    assert "below_decode_threshold" in output
    for figure in ("efficiency", "schedule_efficiency", "hidden", "speedup", "serial_unsplit", "overlapped_2"):
        assert figure in output
    events = json.loads((example.folder / "demo" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    page = (example.folder / "demo" / "trace.html").read_text()
    assert "dispatch" in page
    assert "http" not in page.replace("http://www.w3.org/", "")


def test_training_starts(example: Example) -> None:
    example.output(PATIENCE_S)
    trained = example.folder / "trained"
    assert (trained / "model.safetensors").stat().st_size < 8_000_000
    assert (trained / "tokenizer.json").is_file()


def test_the_committed_checkpoint_is_small() -> None:
    folder = ROOT / "examples" / "models" / "tiny-moe"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8_000_000
