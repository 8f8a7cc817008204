"""`ubatch bench transformers`, on a model of a few thousand weights: both arms run, equal, and one of them overlaps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_runner import RandomQwen3Moe, make_random_checkpoint
from serving.workbench.bench.runtime.transformers_step import Options, run

SMALL = RandomQwen3Moe(
    vocab_size=128,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)


@pytest.mark.slow
def test_wrapped_against_not_wrapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = make_random_checkpoint(tmp_path / "small", SMALL), tmp_path / "figures.json"
    small = {"blocks": 2, "sequences": 4, "sequence_length": 16, "latency_us": 0.0}
    run(Options(model=model, json_file=file, **small))
    assert "wrapped, over not wrapped" in capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert figures["over_not_wrapped"]["median"] > 0
    assert figures["arms_ms"].keys() >= {"compute_unsplit", "serial_unsplit", "serial_2", "overlapped_2"}
    assert all(len(block_means) == 2 for block_means in figures["arms_ms"].values())
