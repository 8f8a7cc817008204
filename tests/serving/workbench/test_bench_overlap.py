"""`ubatch bench overlap`: what it writes, and a bound that nothing passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_runner import RandomQwen3Moe, make_random_qwen3_moe
from serving.workbench.bench.runtime.overlap import Options, _lane_result, run
from serving.workbench.planning.measured import gates_of_results

pytestmark = pytest.mark.long


def test_no_step_passes_the_bound() -> None:
    """Lanes one after the other may compute for longer than the overlapped step takes: it reads weights once."""
    step, link = [100.0, 104.0, 98.0], [90.0] * 3
    for split, own in ((120.0, 95.0), (90.0, 97.0), (60.0, 60.0)):
        arms = {"serial_unsplit": [190.0] * 3, "serial_4": [200.0] * 3, "overlapped_4": step, "ideal_4": [99.0] * 3}
        arms |= {"split_compute_4": [split] * 3, "own_compute_4": [own] * 3, "communication_4": link}
        result = _lane_result(arms, 4, [4])
        compute = min(split, own)
        assert result.efficiency.median == pytest.approx(max(compute, 90.0) / 100.0)
        assert result.hidden.median == pytest.approx((compute + 90.0 - 100.0) / min(compute, 90.0))
        assert result.efficiency.high <= 1.0
        assert result.speedup.median == 1.9


def test_the_file_holds_what_the_simulator_needs(tmp_path: Path) -> None:
    """How near the prediction comes is the machine's to say; no step computed for longer than it took."""
    make_random_qwen3_moe(tmp_path, size=RandomQwen3Moe(hidden_size=64, num_hidden_layers=2, vocab_size=512))
    file = tmp_path / "overlap.json"
    run(Options(model=tmp_path, sequences=2, sequence_length=32, lanes=(2,), ratios=(1.0,), blocks=2, json_file=file))
    (gate,) = gates_of_results(file)
    (link,) = json.loads(file.read_text())["links"]
    assert gate.predicted > 0
    assert gate.distance < 4.0
    for own, wall in zip(link["arms_ms"]["own_compute_2"], link["arms_ms"]["overlapped_2"], strict=True):
        assert 0 < own <= 1.01 * wall
