"""`ubatch simulate`: the gates, the plan, and the command."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from repository import ROOT

from model_runner import RandomQwen3Moe, make_random_qwen3_moe
from moe.balance import PARTS, read_loads, write_loads
from moe.placement import ExpertPlacement
from serving.cli import main
from serving.workbench.arms.programs import write_steps
from serving.workbench.bench.runtime.overlap import Options as Bench
from serving.workbench.bench.statistics import write_json
from serving.workbench.planning import simulate
from serving.workbench.planning.constants import Mode, Workload, load_constants, read_model
from serving.workbench.planning.costs import LayerCosts
from serving.workbench.planning.gates import (
    RANKS,
    Gate,
    balancing_gates,
    crossover,
    held_out_gain,
    held_out_gates,
    published_gates,
    published_placement,
)
from serving.workbench.planning.measured import gates_of_results, live_gates, over_link
from serving.workbench.planning.plan import make_plan, predict_step
from serving.workbench.planning.simulate import skews_of_files
from ubatch.errors import ConfigError
from ubatch.schedules import Compute, Launch, Op, Pass, Wait, simulator
from ubatch.schedules.schedule import SCHEDULES, SERIAL, Schedule

pytestmark = pytest.mark.long

MODEL = read_model("deepseek-v3")
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")
PLANNER = "serving.workbench.planning.gates.plan_placement"


@pytest.fixture(scope="module")
def published() -> list[Gate]:
    return published_gates()


def test_published_gains_are_met(published: list[Gate]) -> None:
    gates = {gate.name: gate for gate in published}
    assert len(gates) == 7
    assert [str(gate) for gate in gates.values() if gate.failed] == []
    crossing = next(gate for name, gate in gates.items() if name.endswith("crossover"))
    assert 64 <= crossing.predicted <= 128
    # One miss: their attention was slowed by an amount that was not published; see docs/simulate.md.
    (missed,) = [gate for gate in gates.values() if not gate.passed]
    assert missed.name.startswith("verify")
    assert missed.distance == pytest.approx(0.10, abs=0.02)


def test_the_document_has_the_predicted_gains(published: list[Gate]) -> None:
    """Row by row, of all gates; where they differ, put these in."""
    of_prefill, gates = [], []
    for gate in published:
        value = f"{gate.predicted:.0f} tokens" if gate.unit == "tokens" else f"{gate.predicted:+.1%}"
        off = f"{gate.distance * 100:.1f}".replace("0.0", "0") + ("" if gate.passed else " (missed)")
        (of_prefill if gate.name.startswith("prefill") else gates).append((value, off))
    gates.insert(0, (" / ".join(value for value, _ in of_prefill), " / ".join(off for _, off in of_prefill)))
    shown = re.findall(r"^\| (?:prefill|decode|verify), .*? \| (.*?) \| .*? \| (.*?) \|$", PAGE, re.MULTILINE)
    assert shown == gates


@pytest.mark.wide
def test_a_known_miss_is_printed_as_one(
    published: list[Gate], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate, "published_gates", lambda: published)
    assert main(["simulate", "--gates"]) == 0  # those of the planner, too, on loads that are held out
    lines = capsys.readouterr().out.splitlines()
    (verify,) = [line for line in lines if line.startswith("verify")]
    assert "10.1  MISSED" in verify
    assert lines[-1] == "1 of 24 gates missed"


@pytest.mark.wide
def test_published_gains_of_balance_are_met() -> None:
    """Row by row; where the document differs, put these in."""
    gates = balancing_gates()
    assert [str(gate) for gate in gates if not gate.passed] == []
    assert sum("fitted" not in gate.name for gate in gates) == 2
    shown = re.findall(r"^\| ((?:SGLang|ATOM) .*?) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    expected = [(g.name, f"{g.predicted:+.1%}", g.observed, f"{g.distance * 100:.1f}%") for g in gates]
    assert shown == expected, "\n".join(f"| {' | '.join(row)} |" for row in expected)


def test_gates_of_balance_notice_a_planner_that_does_not_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLANNER, lambda loads, placement: placement)
    assert sum(gate.failed for gate in balancing_gates()) == 4  # all but that of perfect balance


def test_crossover_by_hand() -> None:
    assert crossover({32: -0.2, 64: -0.1, 128: 0.1}) == 96
    assert crossover({32: -0.2, 64: -0.1}) == 64
    assert crossover({32: 0.2, 64: 0.3}) == 32


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """What a benchmark of two ranks writes: one layer a lane, of 3 and 4 ms of compute, and a link that keeps up."""
    schedule = SCHEDULES["mlp_shared_overlap"]

    def lane(layer_s: float) -> list[Op]:
        return [Compute(layer_s), Launch("there", 2e-3, 1e-3), Pass("dispatch"), Wait("there"), Compute(1e-3)]

    steps = [[[lane(2e-3), lane(2e-3)], [lane(3e-3), lane(2e-3)]]] * 2
    stages = {"schedule": schedule.to_mapping(), "around_ms": 0.5, "steps": write_steps(steps)}
    link = {"ratio": 1.0, "lanes": {"2": {}}, "arms_ms": {"overlapped_2": [8.5, 8.6, 9.0]}, "stages": {"2": stages}}
    write_json(tmp_path / "overlap.json", {"links": [link]})
    return tmp_path / "overlap.json"


def test_measured_overlap_is_simulated_from_its_stages(results: Path) -> None:
    """The slow rank has sent after 5 ms, the second transfer takes 2 and the rest 1; 0.5 are around the lanes."""
    (gate,) = gates_of_results(results)
    assert gate.passed, gate
    assert gate.predicted == pytest.approx(8.5, abs=0.1)
    slower = json.loads(results.read_text())
    first = slower["links"][0]["stages"]["2"]["steps"]
    for ranks in first:
        ranks[1][0][0] = "compute 0.005"
    results.write_text(json.dumps(slower))
    (missed,) = gates_of_results(results)
    assert missed.predicted == pytest.approx(gate.predicted + 2.0, abs=0.05)
    assert not missed.passed


@pytest.mark.parametrize("name", ["overlap.json", "overlap-ratios.json"])
def test_measured_overlap_is_met(name: str) -> None:
    """Of what was measured on a CPU: every link, every number of lanes; the document says how nearly."""
    gates = gates_of_results(RESULTS / name)
    assert len(gates) >= 3
    assert sum(gate.passed for gate in gates) >= len(gates) - 1
    (shown,) = re.findall(rf"^\| `{name}` .* \| (.*?) \|$", PAGE, re.MULTILINE)
    assert shown == ", ".join(f"{gate.distance * 100:.1f}{'' if gate.passed else ' (missed)'}" for gate in gates)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("simulate", lambda programs, schedule, *_: empty_timeline(programs, schedule)),
        ("launch", lambda machine, lane, op: arrives_at_once(machine, lane, op)),
        ("wait", lambda machine, owner, runner, key: None),
        ("compute", lambda machine, lane, seconds: None),
    ],
)
def test_the_second_gate_notices_a_broken_simulator(
    name: str, broken: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored predictions are nowhere used: the gate runs the simulator, and each of its parts."""
    holder = simulator if name == "simulate" else simulator._Machine
    monkeypatch.setattr(holder, name, broken)
    gates = [gate for file in ("overlap.json", "overlap-ratios.json") for gate in gates_of_results(RESULTS / file)]
    assert sum(gate.failed for gate in gates) >= 2  # where compute decides, a link that is too fast changes little


def empty_timeline(programs: Sequence[Sequence[Op]], schedule: Schedule) -> simulator.Timeline:
    """Of a simulator that simulates nothing."""
    launched = {(lane, op.key): 0.0 for lane, ops in enumerate(programs) for op in ops if isinstance(op, Launch)}
    return simulator.Timeline(launched=launched)


def arrives_at_once(machine: simulator._Machine, lane: int, op: Launch) -> None:
    machine.line.launched[lane, op.key] = machine.arrival[lane, op.key] = machine.now


def test_files_that_are_something_else_are_refused(tmp_path: Path) -> None:
    link = '"lanes": {"2": {}}, "arms_ms": {"overlapped_2": [1.0]}, "ratio": 1.0'
    without = ('{"links": [{"lanes": {"2": {}}, "arms_ms": {}}]}', f'{{"links": [{{{link}}}]}}')
    strange = f'{{"links": [{{{link}, "stages": {{"2": {{"schedule": {{}}, "steps": [[[["nonsense"]]]]}}}}}}]}}'
    for content in ("no json", "{}", *without, strange):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ConfigError, match="not what `ubatch bench overlap --json` writes"):
            gates_of_results(tmp_path / "x.json")


def test_over_another_link_by_hand() -> None:
    program: list[Op] = [Compute(1.0), Launch("t", 5.0, 3.0), Launch("u", 5.0), Launch("v", 0.0, 3.0), Wait("t")]
    moved = over_link([program], latency_s=1.0, measured_bytes_per_s=10.0, bytes_per_s=20.0)
    assert moved == [[Compute(1.0), Launch("t", 3.0, 2.0), Launch("u", 3.0), Launch("v", 0.0, 2.0), Wait("t")]]


@pytest.mark.slow
def test_live_comparison_runs_on_two_ranks(tmp_path: Path) -> None:
    """How near it comes is the command's to say, on a machine that does nothing else; here, that it is no nonsense."""
    size = RandomQwen3Moe(hidden_size=64, num_hidden_layers=2, vocab_size=512)
    make_random_qwen3_moe(tmp_path, size=size)
    bench = Bench(model=tmp_path, sequences=2, sequence_length=32, lanes=(2,), ratios=(1.0, 8.0), blocks=2)
    found = live_gates(bench)
    assert [gate.unit for gate in found] == ["ms", "ms"]
    assert all(gate.predicted > 0 and gate.distance < 4.0 for gate in found)
    assert found[1].predicted > found[0].predicted


@pytest.mark.wide
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("hardware", "mode", "ep", "tokens"),
    [("h100-ib", "decode", 128, 128), ("h100-ib", "prefill", 32, 8192), ("h200-ib", "verify", 64, 256)],
)
def test_the_plan_pays_from_its_threshold_on(hardware: str, mode: str, ep: int, tokens: int) -> None:
    machine = load_constants().machine(hardware)
    load = Workload(Mode(mode), tokens, 4096, ep, tokens_per_sequence=2 if mode == "verify" else 1)
    plan = make_plan(MODEL, machine, load, max_chunks=2)
    assert plan.speedup > 1.05
    assert plan.threshold is not None
    assert all(plan.best.seconds <= step.seconds * 1.001 for step in plan.named.values())

    def speedup(tokens: int) -> float:
        table = LayerCosts(MODEL, machine, replace(load, tokens=tokens))
        return predict_step(table, SERIAL).seconds / predict_step(table, plan.best.schedule).seconds

    assert speedup(plan.threshold) >= 1.01
    assert speedup(plan.threshold - 1) < 1.01 or plan.threshold <= plan.best.schedule.lanes


@pytest.mark.wide
def test_weak_compute_or_a_fast_link_stays_with_one_batch() -> None:
    """Published: on H20 single-batch replaced two-batch overlap at small batches, on GB200 altogether."""
    for hardware, ep, tokens in (("h20-ib", 16, 32), ("gb200-nvl72", 48, 128)):
        plan = make_plan(MODEL, load_constants().machine(hardware), Workload(Mode.DECODE, tokens, 4096, ep))
        assert plan.best.schedule.lanes == 1
        assert plan.named["two_batch_decode"].seconds > 1.2 * plan.serial.seconds


@pytest.mark.wide
def test_the_command_says_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    words = "simulate --hardware h100-ib --ep 128 --model deepseek-v3 --mode decode --max-chunks 2"
    assert main([*words.split(), "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("prediction for deepseek-v3 on h100-ib, EP 128, decode: 128 tokens a rank")
    for word in ("best", "threshold", "bound by", "mlp_shared_overlap"):
        assert word in text
    written = json.loads(file.read_text())
    assert written["prediction"] is True
    assert written["best"]["schedule"]["lanes"] == 2
    assert written["speedup"] == pytest.approx(written["serial"]["seconds"] / written["best"]["seconds"])


@pytest.mark.wide
def test_loads_from_a_file_say_how_long_every_layer_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In half of the layers one rank has twice the mean: the mean of a balanced step and of one with such a rank."""
    loads = np.ones((2, 58, 256))
    loads[:, :29, :8] = 62 / 30  # of 32 ranks, the first: 2 of the mean
    write_loads(tmp_path / "loads.npy", loads)
    words = ["simulate", "--mode", "prefill", "--max-lanes", "1", "--max-chunks", "1"]

    def serial_s(*more: str) -> float:
        assert main([*words, *more, "--json", str(tmp_path / "plan.json")]) == 0
        return float(json.loads((tmp_path / "plan.json").read_text())["serial"]["seconds"])

    of_file = serial_s("--expert-loads", str(tmp_path / "loads.npy"))
    assert "busiest rank 1.00x to 2.00x the mean, by layer" in capsys.readouterr().out
    assert of_file == pytest.approx((serial_s() + serial_s("--skew", "2")) / 2, rel=1e-3)
    turned = np.roll(np.arange(256).reshape(32, 8), 1, axis=1).ravel()  # each rank holds what it held before
    spread = np.arange(256).reshape(8, 32).T.ravel()  # and here the first eight are on eight ranks
    for experts, expected in ((turned, of_file), (spread, serial_s("--skew", str(1 + 12 / 124 / 2)))):
        ExpertPlacement(np.tile(experts, (58, 1)), 256, 32).save(tmp_path / "placement.yaml")
        files = ("--expert-loads", str(tmp_path / "loads.npy"), "--expert-placement", str(tmp_path / "placement.yaml"))
        assert serial_s(*files) == pytest.approx(expected, rel=1e-3)


def test_loads_of_another_model_are_refused(tmp_path: Path) -> None:
    model = read_model("deepseek-v3")
    write_loads(tmp_path / "loads.npy", np.ones((58, 128)))
    with pytest.raises(ConfigError, match="has 58 MoE layers of 128 experts, but deepseek-v3 has 58 of 256"):
        skews_of_files(model, 32, 0, tmp_path / "loads.npy", None)
    write_loads(tmp_path / "loads.npy", np.ones((58, 256)))
    ExpertPlacement.default(58, 256, 16).save(tmp_path / "placement.json")
    with pytest.raises(ConfigError, match="58 MoE layers on 16 ranks, but the step has 256 of 58 on 32"):
        skews_of_files(model, 32, 0, tmp_path / "loads.npy", tmp_path / "placement.json")


@pytest.mark.wide
def test_figures_beyond_the_tables_are_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate --ep 128 --mode prefill --max-lanes 2 --max-chunks 1"
    assert main(words.split()) == 0
    assert "not published for so many ranks" in capsys.readouterr().out


@pytest.mark.wide
def test_a_missed_gate_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--measured", str(results)]) == 0
    assert "0 of 1 gates missed" in capsys.readouterr().out
    slow = json.loads(results.read_text())
    slow["links"][0]["arms_ms"]["overlapped_2"] = [1000.0]
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    assert main(["simulate", "--measured", str(tmp_path / "slow.json")]) == 1
    assert "FAILED" in capsys.readouterr().out
    monkeypatch.setattr(simulate, "held_out_gates", list)
    for cause, status in (("", 1), ("known", 0)):
        gate = Gate("a gain", 0.1, "+50%", 0.4, 0.05, cause=cause)
        monkeypatch.setattr(simulate, "published_gates", lambda gate=gate: [gate])
        assert main(["simulate", "--gates"]) == status


# -- the planner against the published algorithm in predicted steps, on loads that neither has seen --------------------


@pytest.mark.wide
def test_never_worse_and_somewhere_better() -> None:
    gates = list(held_out_gates())
    assert len(gates) == 12
    assert [str(gate) for gate in gates if not gate.passed] == []
    assert sum(gate.predicted > 0.02 for gate in gates) >= 4


@pytest.mark.wide
def test_never_worse_for_source_text_and_mostly_better() -> None:
    """Loads of a router over this repository's files, in windows of eight parts.

    Three windows are judged by chance (the gain has a deviation of 1 to 3%), so they begin at every second of 32 parts.
    """
    parts = read_loads(ROOT / "examples" / "expert_loads" / "128-experts.npy")
    runs = [np.roll(parts, -start, axis=0).reshape(4, 8, -1, 128) for start in range(0, len(parts), 2)]
    cases = [(ranks, redundant) for ranks in RANKS for redundant in (0, 64)]
    gains = {case: np.mean([held_out_gain(windows, *case) for windows in runs]) for case in cases}
    assert min(gains.values()) > -0.002, gains
    assert sum(gain > 0.003 for gain in gains.values()) >= 4, gains


def test_a_planner_that_is_worse_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLANNER, lambda seen, before: before)
    windows = np.tile(np.arange(1.0, 129.0), (2, PARTS, 2, 1))
    assert held_out_gain(windows, 16, 0) < -0.1
    monkeypatch.setattr(PLANNER, lambda seen, before: published_placement(seen.sum(axis=0), 128, before.num_ranks))
    assert held_out_gain(windows, 16, 0) == 0.0
