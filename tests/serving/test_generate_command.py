"""`ubatch generate` as a user types it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from repository import TINY_MOE

from serving.cli import main
from serving.generate import _why_no_overlap
from serving.ranks import free_port
from serving.requests import EngineStatistics

pytestmark = pytest.mark.long

TINY = str(TINY_MOE)


def test_generate_on_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", TINY, "--prompt", "def main(", "import os", "--max-tokens", "5", "--enable-dbo"]) == 0
    captured = capsys.readouterr()
    assert "def main(self" in captured.out
    assert "steps: 0 overlapped, 5 not (no_gain_expected 5)" in captured.out
    assert "no step overlapped: their own times show no gain" in captured.err


def test_why_generate_overlapped_nothing() -> None:
    settings = {"dbo_decode_token_threshold": 32, "dbo_prefill_token_threshold": 512}
    steps = {"decode/below_decode_threshold": 4, "prefill/below_prefill_threshold": 1}
    (why,) = _why_no_overlap(settings, {0: EngineStatistics(steps=steps)})  # type: ignore[arg-type]
    assert why.startswith(
        "no step overlapped: each was smaller than --dbo-decode-token-threshold (32) or --dbo-prefill"
    )
    assert list(_why_no_overlap(settings, {0: EngineStatistics(steps={**steps, "decode/engaged": 1})})) == []  # type: ignore[arg-type]


def test_generate_is_no_job_of_a_launcher(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for size, status in (("2", 2), ("1", 0)):
        monkeypatch.setenv("WORLD_SIZE", size)
        assert main(["generate", TINY, "--prompt", "x", "--print-config"]) == status
    assert "for several machines give --nnodes" in capsys.readouterr().err


@pytest.mark.slow
def test_generate_on_two_machines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Both on this one; the second one has ranks only, and ends with the first."""
    words = ["generate", TINY, "--prompt", "def main(", "import os", "--max-tokens", "5"]
    assert main(words) == 0
    alone = capfd.readouterr().out.split("steps:")[0]
    words += ["--data-parallel-size", "2", "--enable-expert-parallel", "--nnodes", "2", "--master-addr", "127.0.0.1"]
    words += ["--master-port", str(free_port())]
    other = [sys.executable, "-m", "serving.cli", *words, "--node-rank", "1"]
    with subprocess.Popen(other, stdout=subprocess.PIPE, text=True) as second:
        try:
            assert main(words) == 0
            assert (second.wait(60), second.stdout and second.stdout.read()) == (0, "")
        finally:
            second.kill()
    together = capfd.readouterr().out
    assert together.split("steps:")[0] == alone
    assert "memory of rank 1: KV cache" in together


def test_generate_on_two_ranks_is_the_same(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = ["--prompt", "def main(", "import os", "class Server:", "for i in", "--max-tokens", "5"]
    assert main(["generate", TINY, *prompts]) == 0
    plain = capfd.readouterr().out.split("steps:")[0]
    settings = tmp_path / "dbo.yaml"
    settings.write_text("dbo-decode-token-threshold: 2\ndbo_prefill_token_threshold: 4\n")
    flags = ["--data-parallel-size", "2", "--enable-expert-parallel", "--enable-dbo", "--config", str(settings)]
    assert main(["generate", TINY, *prompts, *flags, "--emulated-link", "10", "1000"]) == 0
    overlapped = capfd.readouterr().out
    assert overlapped.split("steps:")[0] == plain
    assert "steps: 10 overlapped, 0 not" in overlapped


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--enable-expert-parallel"], "--data-parallel-size 2 or more"),
        (["--all2all-backend", "torch_dist"], "--enable-expert-parallel"),
        (["--emulated-link", "1", "1"], "--enable-expert-parallel"),
        (["--enable-dbo", "--schedule", "mlp_shared"], "did you mean 'mlp_shared_overlap'"),
        (["--enable-dbo", "--ubatch-size", "1"], "--ubatch-size 1: it should be at least 2"),
        (["--enable-dbo", "--dbo-decode-token-threshold", "1"], "below --ubatch-size (2)"),
        (["--config", "nowhere.yaml"], "cannot read nowhere.yaml"),
        (["--max-tokens", "5000"], "positions"),
        (["--device", "cpu", "--cudagraph-mode", "full"], "--cudagraph-mode full needs a GPU"),
        (["--device", "cpu", "--cudagraph-capture-sizes", "1", "2"], "--cudagraph-capture-sizes is for CUDA graphs"),
        (["--enforce-eager", "--cudagraph-mode", "full"], "--enforce-eager and --cudagraph-mode full contradict"),
        (["--data-parallel-size", "2", "--device", "cuda"], "there is no GPU here that torch can use"),
    ],
)
def test_wrong_settings_are_one_clear_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", TINY, "--prompt", "x", *flags]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_unknown_key_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tmp_path / "dbo.yaml"
    settings.write_text("dbo-decode-token-treshold: 8\n")
    assert main(["generate", TINY, "--prompt", "x", "--config", str(settings)]) == 2
    assert "did you mean 'dbo-decode-token-threshold'" in capsys.readouterr().err


def test_a_folder_that_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert "config.json is missing" in capsys.readouterr().err
