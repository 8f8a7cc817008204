"""`ubatch generate` as a user types it."""

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
