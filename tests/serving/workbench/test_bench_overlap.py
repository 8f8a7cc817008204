"""`ubatch bench overlap`: what it writes, and a bound that nothing passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from model_runner import RandomQwen3Moe, make_random_qwen3_moe
from moe import EmulatedLink
from serving.ranks import run_ranks
from serving.workbench.bench.runtime.overlap import Options, _ideal_ms, _lane_result, run
from serving.workbench.bench.step_setting import Setting, open_setting
from serving.workbench.planning.measured import gates_of_results
from ubatch import SCHEDULES, Schedule, UBatchConfig, UBatchError
from ubatch.schedules.simulate import Compute

pytestmark = pytest.mark.long

SMALL = RandomQwen3Moe(hidden_size=64, num_hidden_layers=2, vocab_size=512)


def test_no_step_passes_the_bound() -> None:
    """Lanes one after the other may compute for longer than the overlapped step takes: it reads weights once."""
    step, link = [100.0, 104.0, 98.0], [90.0] * 3
    for split, own in ((120.0, 95.0), (90.0, 97.0), (60.0, 60.0)):
        arms = {"serial_unsplit": [190.0] * 3, "serial_4": [200.0] * 3, "overlapped_4": step, "ideal_4": [99.0] * 3}
        arms |= {
            "compute_unsplit": [100.0] * 3,
            "split_compute_4": [split] * 3,
            "own_compute_4": [own] * 3,
            "communication_4": link,
        }
        result = _lane_result(arms, 4, [4])
        compute = min(split, own)
        assert result.efficiency.median == pytest.approx(max(compute, 90.0) / 100.0)
        assert result.hidden.median == pytest.approx((compute + 90.0 - 100.0) / min(compute, 90.0))
        assert result.efficiency.high <= 1.0
        assert result.speedup.median == 1.9
        assert result.of_bound.median == pytest.approx(1.9 / (190.0 / max(split, 90.0)))


def test_the_ideal_machine_computes_as_long_as_the_bound_takes_for_compute() -> None:
    """Else each lane more made a step look better than ideal, and void: four lanes, one by one, took 4% longer."""
    steps = [[[[Compute(0.03)], [Compute(0.03)]]] * 2]
    arms = {"split_compute_2": [60.0, 62.0, 60.0], "own_compute_2": [54.0, 54.0, 70.0]}
    assert _ideal_ms(arms, 2, steps, SCHEDULES["mlp_shared_overlap"]) == pytest.approx(54.0)
    arms["own_compute_2"] = [80.0] * 3
    assert _ideal_ms(arms, 2, steps, SCHEDULES["mlp_shared_overlap"]) == pytest.approx(60.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_schedule_that_computes_something_else_is_refused(dtype: torch.dtype) -> None:
    plain = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    wrong = plain.clone()
    wrong[5] = plain[6]

    class WrongInThree(Setting):
        def step(self, schedule: Schedule) -> torch.Tensor:
            return wrong if schedule.lanes == 3 else plain

    setting = WrongInThree(torch.nn.Identity(), UBatchConfig(), None, EmulatedLink(0.0, 1.0))
    setting.check_equal([setting.schedule(2)])
    with pytest.raises(UBatchError, match="computes something else"):
        setting.check_equal([setting.schedule(2), setting.schedule(3)])


def test_the_file_holds_what_the_simulator_needs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """How near the prediction comes is the machine's to say; no step computed for longer than it took."""
    make_random_qwen3_moe(tmp_path, size=SMALL)
    file = tmp_path / "overlap.json"
    small = {"sequences": 2, "sequence_length": 32, "lanes": (2,), "ratios": (1.0,), "blocks": 2}
    run(Options(model=tmp_path, json_file=file, **small))
    out = capfd.readouterr().out
    assert "in float32, 2 ranks, each with 2 prompts of 32 tokens" in out
    assert "of_bound" in out  # printed by rank 0
    (gate,) = gates_of_results(file)
    (link,) = json.loads(file.read_text())["links"]
    assert gate.predicted > 0
    assert gate.distance < 4.0
    for own, wall in zip(link["arms_ms"]["own_compute_2"], link["arms_ms"]["overlapped_2"], strict=True):
        assert 0 < own <= 1.01 * wall


def test_the_ranks_compute_in_the_dtype_asked_for(tmp_path: Path) -> None:
    make_random_qwen3_moe(tmp_path, size=SMALL)
    options = Options(model=tmp_path, sequences=2, sequence_length=32, dtype="bfloat16")
    assert run_ranks(_dtype_in_lanes, 2, options, tmp_path) == "torch.bfloat16"


@torch.inference_mode()
def _dtype_in_lanes(rank: int, world_size: int, options: Options, model: Path) -> str:
    with open_setting(rank, options, model) as setting:
        setting.check_equal([setting.schedule(2)])
        return str(setting.step(setting.schedule(2)).dtype)
