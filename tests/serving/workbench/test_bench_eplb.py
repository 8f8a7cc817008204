"""`ubatch bench eplb`: it runs small, prints and writes what it found; its arithmetic by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from model_runner import FinishReason, GenerationOutput, RandomQwen3Moe, TokenLogprobs, make_random_checkpoint
from moe import ExpertPlacement, SoftmaxTopKRouter
from serving.cli import main
from serving.workbench.arms.stages import with_loads
from serving.workbench.bench.eplb.gain import predicted_s, share_of_possible
from serving.workbench.bench.eplb.moving import SameResult, count_different, ratio_of_p99, ratio_of_steps
from serving.workbench.bench.eplb.skewed import UniformRouter, on_next_ranks, skewed_order
from ubatch import ConfigError, UBatchError, get_schedule
from ubatch.schedules import Compute, Launch, LayerTimes, Op, RankLoad, layer_program, rank_loads, simulate_ranks

pytestmark = pytest.mark.long

SMALL = RandomQwen3Moe(
    **{"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8},
    **{"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
)


@pytest.mark.wide
def test_every_part_runs_prints_and_writes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, file = make_random_checkpoint(tmp_path / "model", SMALL), tmp_path / "eplb.json"
    words = ["bench", "eplb", "--model", str(model), "--sequences", "4", "--sequence-length", "32", "--quick"]
    words += ["--latency-us", "0", "--new-tokens", "8", "--window-size", "20", "--step-interval", "40", "--shifts", "1"]
    status = main([*words, "--json", str(file)])
    report, printed = json.loads(file.read_text()), capfd.readouterr().out
    gain, same, predict, counting = (report[part] for part in ("gain", "same", "predict", "counting"))
    assert status == (gain["possible"]["serial"]["median"] < 1.15)  # of steps this short nothing is known
    assert same == {"tokens": 2 * 2 * 4 * 8, "different": 0, "ties": same["ties"], "switched": 2}
    assert gain["balancedness"]["without"] < 0.8 < 0.9 < gain["balancedness"]["with"]
    assert gain["balancedness"]["perfect"] == 1.0
    assert set(gain["arms_ms"]) == {
        f"{name} {lanes}" for name in ("without", "with", "perfect") for lanes in ("serial", "dbo")
    }
    assert {len(blocks) for part in (gain, predict, counting) for blocks in part["arms_ms"].values()} == {3}
    kinds = ("one by one", "overlapped")
    assert set(predict["steps"]) == {f"{name}, {kind}" for name in ("without", "with") for kind in kinds}
    for layer in predict["loads"]["without"]:
        assert sum(rank["experts"] for rank in layer) == pytest.approx(2.0)
        assert [rank["sent"] for rank in layer] == [rank["received"] for rank in reversed(layer)]
    assert 0 < counting["share"]["prefill"]["median"] < 0.1
    moving, shift = report["moving"], report["shift"]
    assert (moving["tokens"], moving["steps"], moving["moving_steps"]) == (4 * 32 // 2, 24, 6)
    assert moving["moved_bytes"] >= 2 * 2 * 8 * 3 * 32 * 16 * 4  # both layers of both ranks, at least once
    assert [len(values) for values in moving["steps_ms"].values()] == [18, 6]
    assert all(1 <= steps <= 40 for steps in moving["rearrangements"])
    assert shift["most"] == {"interval": 60, "early": 40}
    for mode in ("interval", "early"):
        (found,) = shift["shifts"][mode]
        assert found["before"] < found["best"] <= 1.0
        assert found["rearrangements"] >= (found["steps"] is not None)
    assert printed.count(f"wrote {file}") == 6  # after each part
    for text in ("steps of a full rearrangement", "shifts of popularity (window 20 steps, interval 40)"):
        assert text in printed
    for text in ("of_possible", "same tokens: 0 of 128 differ", "predicted from balanced stages", "timed alone"):
        assert text in printed


def test_uniform_routing_visits_all_experts_equally() -> None:
    router = UniformRouter(SoftmaxTopKRouter(2), 8, seed=0)
    weights, ids = router(torch.randn(12, 8))
    assert torch.bincount(ids.flatten(), minlength=8).tolist() == [3] * 8
    assert all(len(set(row)) == 2 for row in ids.tolist())
    assert weights.shape == (12, 2)
    assert router(torch.randn(12, 8))[1] is ids  # the same in every step


def test_the_share_of_what_is_possible_by_hand() -> None:
    """10 steps a second without, 19 with and 20 at best."""
    assert share_of_possible([0.1], [1 / 19], [0.05]).median == pytest.approx(0.9)
    assert share_of_possible([0.1] * 3, [0.1] * 3, [0.05] * 3).median == 0.0


def traced(program: list[Op]) -> list[Op]:
    """As traced: behind every launch what the transport computed."""
    return [each for op in program for each in ((op, Compute(0.0)) if isinstance(op, Launch) else (op,))]


def test_predictions_are_those_of_the_loads_from_the_start() -> None:
    times = LayerTimes(attn_core=1e-2, experts=4e-2, dispatch=2e-2, combine=1e-2)
    serial = get_schedule("serial")
    balanced = [traced(layer_program(times, 2, serial))]
    even = [[RankLoad(), RankLoad()]] * 2
    assert predicted_s([[balanced, balanced]] * 3, serial, even) == pytest.approx(0.16)
    skewed = [rank_loads([3, 1]), rank_loads([1, 3])]
    lines = simulate_ranks([[layer_program(times, 2, serial, own)] for own in zip(*skewed, strict=True)], serial)
    expected = max(line.seconds for line in lines)
    assert predicted_s([[balanced, balanced]] * 3, serial, skewed) == pytest.approx(expected)
    with pytest.raises(ConfigError, match="loads of 3 layers were given for 2"):
        with_loads(balanced[0], [RankLoad()] * 3)


def test_a_disturbance_of_either_rank_delays_both() -> None:
    """Each step takes as long as its slower rank, which the mean of the ranks would hide."""
    serial = get_schedule("serial")
    fast, slow = (
        [traced(layer_program(LayerTimes(attn_core=own, experts=4e-2, dispatch=0.0, combine=0.0), 1, serial))]
        for own in (1e-2, 3e-2)
    )
    assert predicted_s([[fast, slow], [slow, fast]], serial, [[RankLoad()] * 2]) == pytest.approx(0.07)


def test_all_experts_change_their_ranks_together() -> None:
    placement = ExpertPlacement(np.array([[0, 1, 2, 3, -1, -1], [2, 0, -1, 1, 3, -1]]), 4, 2)
    assert on_next_ranks(placement).experts.tolist() == [[3, -1, -1, 0, 1, 2], [1, 3, -1, 2, 0, -1]]


def test_the_slowest_steps_are_compared_over_all_blocks() -> None:
    still = [[1.0] * 50, [2.0] * 50]
    assert ratio_of_p99([[2.0] * 50, [3.0] * 50], still).median == 1.5
    assert ratio_of_p99(still, still).median == 1.0


@pytest.mark.wide
def test_steps_are_compared_with_single_steps() -> None:
    """Of the same times in both, some of them long: the median of two is higher than that of six."""
    times = np.random.default_rng(0).exponential(size=(500, 8)) + 1
    few, many = times[:, :2].tolist(), times[:, 2:].tolist()
    assert np.median(np.median(few, axis=1) / np.median(many, axis=1)) > 1.04
    found = ratio_of_steps(few, many)
    assert found.low < 1 < found.high
    assert ratio_of_steps([[3.0, 6.0]], [[2.0, 2.0, 2.0]]).median == 2.25


def output(*tokens: int, second: float = -9.0) -> GenerationOutput:
    logprobs = tuple(TokenLogprobs(token, -0.1, 1, ((token, -0.1), (99, second))) for token in tokens)
    return GenerationOutput((), tokens, FinishReason.LENGTH, logprobs)


def test_different_tokens_are_counted_but_for_those_behind_a_tie() -> None:
    expected = [output(1, 2, 3), output(1, 2, 3), output(1, 2, 3, second=-0.10001)]
    assert count_different(expected, expected) == (9, 0, 0)
    found = [output(1, 2, 3), output(1, 5, 6), output(1, 5, 6)]
    assert count_different(expected, found) == (9, 2, 1)


def test_equal_tokens_prove_nothing_if_no_experts_moved(capsys: pytest.CaptureFixture[str]) -> None:
    assert not SameResult(8, 0, 0, switched=2).void
    still = SameResult(8, 0, 0, switched=0)
    assert still.void
    still.print()
    assert "no experts changed their ranks while" in capsys.readouterr().out


@pytest.mark.wide
def test_an_order_is_found_that_hardly_any_draw_has() -> None:
    """Experts that differ little, in a placement that is nearly balanced whatever their order."""
    loads, placement = np.tile(np.linspace(1, 30, 64), (3, 1)), ExpertPlacement.default(3, 64, 2)
    order = skewed_order(loads, placement, 0.72, np.random.default_rng(0)).numpy()
    assert (np.sort(order) == np.arange(64)).all()
    assert placement.balancedness(np.take_along_axis(loads, order, axis=1)) == pytest.approx([0.72] * 3, abs=0.02)
    with pytest.raises(UBatchError, match=r"no order of 64 experts has a balancedness of 0\.3"):
        skewed_order(loads, placement, 0.3, np.random.default_rng(0))
