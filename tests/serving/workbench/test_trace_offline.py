"""`ubatch trace MODEL --prompt ...`: what it chooses where nobody did, what it leaves alone, and its arms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import COMMON, GROUPED, make_checkpoint
from repository import TINY_MOE

from model_runner import SamplingParams
from serving.cli import main
from serving.options import Settings
from serving.workbench.tracing import offline, trace
from serving.workbench.tracing.offline import OfflineRun
from ubatch import Span, SpanKind
from ubatch.trace.export import Clock
from ubatch.trace.file import RankTrace
from ubatch.trace.spans import UNSPLIT, StepNote

pytestmark = pytest.mark.long

TINY = str(TINY_MOE)


def run_of(*words: str, model: str = TINY) -> OfflineRun:
    run = trace.read("ubatch trace", "", [model, *words]).run
    assert run is not None
    return run


def chosen(run: OfflineRun) -> list[str]:
    return [line.partition(":")[0].partition(",")[0] for line in run.choices]


THRESHOLDS = ("--dbo-decode-token-threshold 32", "--dbo-prefill-token-threshold 64")


def test_with_its_defaults_steps_overlap_on_two_ranks() -> None:
    run = run_of("--prompt", "def main(", "import os")
    s = run.command.settings
    assert (s["enable_dbo"], s["data_parallel_size"], s["enable_expert_parallel"]) == (True, 2, True)
    ranks = ["--data-parallel-size 2", "--enable-expert-parallel"]
    assert chosen(run) == ["--enable-dbo", *THRESHOLDS, *ranks, "64 prompts"]
    assert all(": " in line or ", " in line for line in run.choices), "with the reason"
    assert run.link
    prompts = run.command.prompts
    assert (len(prompts), len(run.command.params), run.shown) == (64, 64, 2)
    assert prompts[:4] == ("def main(", "import os", "def main(", "import os")
    assert s["max_num_seqs"] == 32 == s["dbo_decode_token_threshold"], "a rank decodes as many as are split"


def test_explicit_settings_win(tmp_path: Path) -> None:
    file = tmp_path / "dbo.yaml"
    file.write_text("dbo-decode-token-threshold: 4\nemulated-link: [20, 50]\n")
    run = run_of("--prompt", "a", "b", "--config", str(file), "--data-parallel-size", "4", "--enable-expert-parallel")
    assert chosen(run) == ["--enable-dbo", THRESHOLDS[1], "16 prompts"]
    assert run.command.settings["emulated_link"] == (20, 50)
    assert not run.link
    enough = run_of("--prompt", *"abcdefgh", "--dbo-decode-token-threshold", "4", "--max-num-seqs", "3")
    assert len(enough.command.prompts) == enough.shown == 8
    assert enough.command.settings["max_num_seqs"] == 3
    assert "64 prompts" not in chosen(enough)
    own = run_of("--prompt", "a", "--no-enable-expert-parallel", "--data-parallel-size", "2")
    assert chosen(own) == ["--enable-dbo", *THRESHOLDS, "64 prompts"]
    assert not own.link, "nothing travels"


def test_without_overlap_nothing_is_chosen() -> None:
    run = run_of("--prompt", "a", "--no-enable-dbo")
    assert (run.choices, run.link, run.overlaps, len(run.command.prompts)) == ((), False, False, 1)
    assert run.command.settings["data_parallel_size"] == 1


def test_a_dense_model_shares_its_heads(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "Qwen3", **{**COMMON, **GROUPED})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (model / file).write_bytes((TINY_MOE / file).read_bytes())
    run = run_of("--prompt", "a", model=str(model))
    assert chosen(run) == ["--enable-dbo", *THRESHOLDS, "--tensor-parallel-size 2", "32 prompts"]
    assert run.link


# ------------------------------------------------------------------------------------------------------------- arms


def recorded(tokens: int, *, overlapped: bool, seconds: float) -> list[RankTrace]:
    """Two ranks of four decode steps that compute half of their time and send 1 MB each."""
    ranks = []
    for rank in (0, 1):
        spans, notes = [], []
        for number in range(1, 5):
            start, end = 10.0 * number, 10.0 * number + seconds
            middle = (start + end) / 2
            spans.append(Span(SpanKind.COMPUTE, "unsplit", UNSPLIT, start, middle, number))
            spans.append(Span(SpanKind.TRANSFER, "dispatch", UNSPLIT, middle, end, number, 2_000_000))
            reason = None if overlapped else "disabled"
            notes.append(StepNote(number, "decode", tokens, "s", 1 + overlapped, 1, reason, None, start, end))
        ranks.append(RankTrace(rank, tuple(spans), tuple(notes), Clock("here", 0.0)))
    return ranks


def test_the_arms_are_a_link_a_serial_run_and_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms: list[tuple[Any, ...]] = []

    def traces(s: Settings, prompts: Sequence[str], params: Sequence[SamplingParams], *, shown: int = 0) -> Any:
        arms.append((s["enable_dbo"], s["emulated_link"], len(prompts), params[0].max_tokens, shown))
        return recorded(32, overlapped=s["enable_dbo"], seconds=2.0 if s["enable_dbo"] else 4.0)

    monkeypatch.setattr(offline, "_traces", traces)
    assert main(["trace", TINY, "--prompt", "a", "--max-tokens", "20", "--out", str(tmp_path / "out")]) == 0
    link = (20.0, 0.5)  # 1 MB out in the two seconds that a step computes
    assert arms == [(False, None, 64, 8, 0), (False, link, 64, 20, 0), (True, link, 64, 20, 1)]
    printed = capsys.readouterr().out
    for choice in ("--enable-dbo: ", "--data-parallel-size 2: ", "64 prompts", "--emulated-link 20 0.5: "):
        assert f"\nchose {choice}" in f"\n{printed}"
    assert "good: decode steps of 32-63 tokens gain 50% (median of 4 steps, 2000.00 ms, against 4 serial" in printed

    arms.clear()
    words = ["--emulated-link", "1", "2", "--serial", str(tmp_path / "serial.json"), "--out", str(tmp_path / "out")]
    trace.write_chrome(
        tmp_path / "serial.json",
        {rank.rank: rank.spans for rank in recorded(32, overlapped=False, seconds=1.0)},
        notes={rank.rank: rank.notes for rank in recorded(32, overlapped=False, seconds=1.0)},
    )
    assert main(["trace", TINY, "--prompt", "a", *words]) == 0
    assert arms == [(True, (1.0, 2.0), 64, 64, 1)], "the serial steps are there already"
    assert "problem: decode steps lose 100% at every size seen" in capsys.readouterr().out


def test_a_serial_trace_without_serial_steps_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = recorded(32, overlapped=True, seconds=1.0)
    file = tmp_path / "trace.json"
    trace.write_chrome(file, {rank.rank: rank.spans for rank in ranks}, notes={rank.rank: rank.notes for rank in ranks})
    assert main(["trace", "--files", str(file), "--serial", str(file), "--out", str(tmp_path / "out")]) == 2
    assert "it has no step without overlap. Record it without --enable-dbo." in capsys.readouterr().err
