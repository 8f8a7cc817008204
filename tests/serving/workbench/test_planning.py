"""The cost tables of `ubatch simulate` against what was published, and against arithmetic by hand.

And `ubatch eplb`: from a file of loads to a placement, scored on steps that it was not planned for.
"""

import json
import re
from dataclasses import replace
from importlib import resources
from itertools import combinations
from math import comb
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from moe import ExpertPlacement
from moe.balance import arrivals, mean_balancedness, plan_placement, write_loads
from serving.cli import main
from serving.workbench import planning
from serving.workbench.planning.constants import GemmKernel, Mode, ModelShape, Workload, load_constants, read_model
from serving.workbench.planning.costs import KernelTimes, LayerCosts, Transfers, expected_destinations, interpolated
from serving.workbench.planning.plan import lane_program, plain_step, predict_step
from ubatch.errors import ConfigError
from ubatch.schedules import Compute, layer_program
from ubatch.schedules.schedule import SCHEDULES, SERIAL, Schedule, SharedExpert

CONSTANTS = load_constants()
MEASURED = yaml.safe_load(resources.files(planning).joinpath("constants.yaml").read_text(encoding="utf-8"))
"""The whole file, with the measurements that constants were derived from."""
MODEL = read_model("deepseek-v3")
H100 = CONSTANTS.machine("h100-ib")
H800 = CONSTANTS.machine("h800-ib")
SIMULATED = [schedule for schedule in SCHEDULES.values() if not schedule.signalled]


def costs(
    mode: Mode = Mode.DECODE, tokens: int = 128, ep: int = 64, model: ModelShape = MODEL, **more: float
) -> LayerCosts:
    context = 4096 if mode is Mode.PREFILL else 2000
    return LayerCosts(model, H100, Workload(mode, tokens, context, ep, **more))  # type: ignore[arg-type]


def gemm_residuals(kernel: GemmKernel) -> np.ndarray:
    """Of DeepGEMM's published table, in the logarithm."""
    kernels = CONSTANTS.kernels.model_copy(update={"gemm": kernel, "gap_us": 0.0})
    times = KernelTimes(H800.gpu, kernels)
    logs = []
    for groups, rows, n, k, tflops in MEASURED["deepgemm"]["rows"]:
        published = 2 * groups * rows * n * k / (tflops * 1e12)
        logs.append(np.log(times.gemm(groups * rows, n, k, groups=groups) / published))
    return np.asarray(logs)


def test_gemm_constants_are_the_least_squares_of_the_published_table() -> None:
    kernel = CONSTANTS.kernels.gemm
    best = np.sqrt(np.mean(gemm_residuals(kernel) ** 2))
    assert best == pytest.approx(0.12, abs=0.01)
    for name in ("hbm_fraction", "fp8_fraction", "launch_us", "norm"):
        for factor in (0.8, 1.25):
            other = kernel.model_copy(update={name: factor * getattr(kernel, name)})
            assert np.sqrt(np.mean(gemm_residuals(other) ** 2)) > best, name


def test_the_published_profiles_are_met() -> None:
    """What the roofline leaves out was derived from these two, and from nothing else."""
    profile = SimpleNamespace(**MEASURED["decode_profile"])
    load = Workload(Mode.VERIFY, profile.tokens, profile.context, profile.ep, profile.tokens_per_sequence)
    layer, tokens = LayerCosts(MODEL, H800, load), profile.tokens
    kernels = layer.kernels()
    stages = [
        layer.prepare_s(kernels, tokens) + layer.attention_s(kernels, tokens),
        layer.gate_s(kernels, tokens),
        layer.experts_s(kernels, tokens),
    ]
    published = [profile.attention_us * 1e-6, profile.gate_us * 1e-6, profile.experts_us * 1e-6]
    assert sum(stages) == pytest.approx(sum(published), rel=0.01)
    assert stages == pytest.approx(published, rel=0.25)

    whole = SimpleNamespace(**MEASURED["prefill_profile"])
    load = Workload(Mode.PREFILL, whole.tokens, whole.context, whole.ep, redundant_experts=whole.redundant_experts)
    step = predict_step(LayerCosts(MODEL, H800, load), SCHEDULES["two_batch_prefill"])
    assert 8 * whole.tokens / step.seconds == pytest.approx(whole.tokens_per_s_per_node, rel=0.01)


@pytest.mark.parametrize(("kind", "column"), [("dispatch", 0), ("combine", 1)])
def test_transfers_are_those_of_the_table(kind: str, column: int) -> None:
    for ep, row in H800.link.low_latency_us.items():
        ends = Transfers(MODEL, H800.link, ep).low_latency_s(kind, 128, 1, 1.0)
        assert sum(ends) * 1e6 == pytest.approx(row[column])
        assert min(ends) > 0
    transfers = Transfers(MODEL, H800.link, 64)
    one, half, two = (sum(transfers.low_latency_s(kind, tokens, 1, 1.0)) for tokens in (128, 64, 256))
    assert two - one == pytest.approx(2 * (one - half))
    assert 2 * half - one == pytest.approx(H800.link.latency_us * 1e-6)
    narrow = replace(MODEL, hidden=MODEL.hidden // 2)
    assert sum(Transfers(narrow, H800.link, 64).low_latency_s(kind, 128, 1, 1.0)) == pytest.approx(half)


def test_high_throughput_counts_bytes_to_distinct_nodes() -> None:
    plain = replace(MODEL, groups=1, top_groups=1)
    nodes = 4 * (1 - comb(192, 8) / comb(256, 8))
    moved = 4096 * nodes * 7168 * (1 + 4 / 128)
    seconds = Transfers(plain, H800.link, 32).high_throughput_s("dispatch", 4096, 1)
    assert seconds == pytest.approx(moved / 58e9 + H800.link.latency_us * 1e-6)


def test_slower_cards_and_ranks_in_between() -> None:
    fast, slow = (Transfers(MODEL, CONSTANTS.machine(name).link, 32) for name in ("h100-ib", "h20-ib"))
    difference = slow.high_throughput_s("combine", 4096, 1) - fast.high_throughput_s("combine", 4096, 1)
    assert difference == pytest.approx(fast.high_throughput_s("combine", 4096, 1) - 37e-6)
    inside = [Transfers(MODEL, CONSTANTS.machine(name).link, 8) for name in ("h100-ib", "h20-ib")]
    assert inside[0].low_latency_s("combine", 64, 1, 1.0) == inside[1].low_latency_s("combine", 64, 1, 1.0)
    table = {8: 1.0, 32: 3.0}
    assert [interpolated(table, at) for at in (2, 8, 16, 32, 64)] == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.0])


def test_destinations_against_counting() -> None:
    """8 experts in 4 groups, of which a token chooses 2, and in them 2 experts: every choice, one by one."""
    model = replace(MODEL, experts=8, groups=4, top_groups=2, top_k=2)
    for places in (2, 4, 8):
        for chunks in (1, 2) if places < 8 else (1,):
            counts = []
            for groups in combinations(range(4), 2):
                eligible = [expert for expert in range(8) if expert // 2 in groups]
                for chosen in combinations(eligible, 2):
                    here = 8 // places
                    counts.append(len({(e // here, e % here * chunks // here) for e in chosen}))
            if places == 2 and chunks == 2:
                continue  # a chunk of a place that holds several groups is then one group: not the even mix assumed
            assert expected_destinations(model, places, chunks) == pytest.approx(float(np.mean(counts)))


@pytest.mark.parametrize(("experts", "top_k", "places", "factor"), [(32, 4, 2, 1.48), (256, 8, 32, 1.06)])
def test_what_chunks_cost_a_transport_that_reduces(experts: int, top_k: int, places: int, factor: float) -> None:
    model = replace(MODEL, experts=experts, top_k=top_k, groups=1, top_groups=1)
    ratio = expected_destinations(model, places, 2) / expected_destinations(model, places)
    assert ratio == pytest.approx(factor, abs=0.005)


@pytest.mark.parametrize("schedule", [*SIMULATED, Schedule("2x2", chunks=2, chunk_dispatch=False)])
def test_the_program_is_the_runtimes_with_the_transfers_kernels_in_it(schedule: Schedule) -> None:
    lane = costs().lane(schedule.lanes, schedule.chunks, schedule.chunk_dispatch)
    program, plain = lane_program([lane] * 3, schedule), layer_program(lane.times, 3, schedule)
    assert [op for op in program if not isinstance(op, Compute)] == [op for op in plain if not isinstance(op, Compute)]
    total = sum(op.seconds for op in program if isinstance(op, Compute))
    assert total == pytest.approx(3 * lane.folded().compute_s)


def test_splitting_small_batches_reads_the_weights_twice() -> None:
    small, large = (costs(tokens=tokens, ep=72).lane(2).folded().compute_s for tokens in (32, 512))
    unsplit_small, unsplit_large = (costs(tokens=tokens, ep=72).lane().folded().compute_s for tokens in (32, 512))
    assert 2 * small / unsplit_small > 1.85
    assert 2 * large / unsplit_large < 1.35


def test_compute_beside_communication_has_fewer_sms() -> None:
    prefill, decode = costs(Mode.PREFILL, 8192, 32), costs()
    alone, beside = prefill.kernels(), prefill.kernels(overlapped=True)
    assert beside.share == pytest.approx(108 / 132)
    assert beside.gemm(8192, 4096, 7168) / alone.gemm(8192, 4096, 7168) == pytest.approx(132 / 108, rel=0.02)
    assert decode.kernels(overlapped=True) == decode.kernels()


@pytest.mark.long
def test_nothing_is_faster_than_its_bound_and_plain_hides_nothing() -> None:
    for mode, tokens in ((Mode.PREFILL, 4096), (Mode.DECODE, 96), (Mode.VERIFY, 96)):
        table = costs(mode, tokens, 32, **({"tokens_per_sequence": 2} if mode is Mode.VERIFY else {}))
        plain = plain_step(table)
        busy = plain.compute_s + plain.communication_s
        assert plain.seconds == pytest.approx(busy + table.rest_s())
        assert predict_step(table, SERIAL).seconds <= plain.seconds
        for lanes in (2, 3, 4):
            for chunks in (1, 2):
                step = predict_step(
                    table, Schedule("n", lanes=lanes, chunks=chunks, shared_expert=SharedExpert.DISPATCH)
                )
                assert step.seconds >= max(step.compute_s, step.communication_s) + table.rest_s() * 0.999
                assert step.seconds <= step.compute_s + step.communication_s + table.rest_s() * 1.001


@pytest.mark.sample(5)
@pytest.mark.parametrize("ep", [8, 16, 24, 32, 64, 72, 128, 256])
@pytest.mark.parametrize("name", list(CONSTANTS.models))
def test_more_skew_and_more_tokens_cost_more(ep: int, name: str) -> None:
    model = read_model(name)
    for mode, tokens in ((Mode.DECODE, 128), (Mode.PREFILL, 4096)):
        seconds = plain_step(costs(mode, tokens, ep, model)).seconds
        assert plain_step(costs(mode, tokens, ep, model, skew=1.3)).seconds > seconds
        assert plain_step(costs(mode, 2 * tokens, ep, model)).seconds > seconds


def test_a_checkpoint_folder_is_read(tmp_path: Path) -> None:
    config = {**CONSTANTS.models["qwen3-30b-a3b"], "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert replace(read_model(str(tmp_path)), name="x") == replace(read_model("qwen3-30b-a3b"), name="x")
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts": 0}))
    for values in ({"linear_num_value_heads": 4}, {"text_config": {"linear_num_value_heads": 4}}):
        with pytest.raises(ConfigError, match="linear attention cannot be planned"):
            ModelShape.from_config("hybrid", {"num_experts": 8, **values}, Path("config.json"))
    with pytest.raises(ConfigError, match="no routed experts"):
        read_model(str(tmp_path))


def test_a_shared_expert_with_a_size_of_its_own() -> None:
    """Qwen2-MoE."""
    values = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "intermediate_size": 5632}
    sizes = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 151_936}
    shared = {"shared_expert_intermediate_size": 5632}
    model = ModelShape.from_config("qwen", {**values, **sizes, **shared}, Path("config.json"))
    assert model.shared_intermediate == 5632


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'deepseek-v3'"):
        read_model("deepseek-v33")
    with pytest.raises(ConfigError, match="did you mean 'h100-ib'"):
        CONSTANTS.machine("h100-lb")
    with pytest.raises(ConfigError, match="between 2 and 256"):
        costs(ep=512)


# -------------------------------------------------------------------------------------------------------- `ubatch eplb`

STEPS, LAYERS, EXPERTS = 6, 3, 16


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    chance = np.random.default_rng(0)
    popularity = 1000 * chance.lognormal(0.0, 1.0, (LAYERS, EXPERTS))
    path = tmp_path / "loads.npy"
    write_loads(path, chance.poisson(popularity, (STEPS, LAYERS, EXPERTS)))
    return path


def eplb(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["eplb", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_the_table_is_of_the_steps_that_were_not_planned_for(loads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = loads.with_name("placement.yaml")
    told = eplb(capsys, loads, "--ranks", 4, "--redundant", 4, "--layers", "--expert-bytes", 10**9, "--out", out)
    steps = np.load(loads)
    in_force = ExpertPlacement.default(LAYERS, EXPERTS, 4, 4)
    planned = plan_placement(steps[:3], in_force)
    assert ExpertPlacement.load(out) == planned
    before, after = (mean_balancedness(each, steps[3:]) for each in (in_force, planned))
    assert "planned for the first 3, scored on the next 3" in told
    assert row(told, "all layers") == [f"{before.mean():.3f}", f"{after.mean():.3f}"]
    assert row(told, "worst layer") == [f"{before.min():.3f}", f"{after.min():.3f}"]
    for layer in range(LAYERS):
        assert row(told, f"layer {layer}") == [f"{before[layer]:.3f}", f"{after[layer]:.3f}"]
    moved = arrivals(in_force, planned).sum()
    assert f"{moved} of {LAYERS * 20} experts move to another rank ({moved} GB)" in told


def row(told: str, name: str) -> list[str]:
    (line,) = re.findall(rf"^ *{name} +(.*)$", told, re.MULTILINE)
    return line.split()


def test_a_placement_in_force_is_kept_if_it_is_as_good(loads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = loads.with_name("placement.json")
    eplb(capsys, loads, "--ranks", 4, "--out", out)
    told = eplb(capsys, loads, "--placement", out)
    assert "do nothing" in told
    assert "0 of 48 experts move" in told


def test_groups_of_experts_stay_on_nodes(loads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = eplb(capsys, loads, "--ranks", 4, "--nodes", 2, "--groups", 4)
    assert "2 groups of experts on each of 2 nodes" in told
    assert "any expert on any of 2 nodes" in eplb(capsys, loads, "--ranks", 4, "--nodes", 2, "--groups", 1)


def test_one_step_is_scored_on_itself_and_says_so(loads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = loads.with_name("one.json")
    write_loads(one, np.load(loads)[:1])
    assert "scored on it; give two steps" in eplb(capsys, one, "--ranks", 5)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--ranks is missing"),
        (["--ranks", "4", "--nodes", "3"], "4 ranks do not divide by 3 nodes"),
        (["--ranks", "4", "--groups", "3"], "16 experts do not divide by 3 groups"),
        (["--placement", "OTHER", "--ranks", "4"], "--ranks has no effect with --placement"),
        (["--placement", "OTHER", "--redundant", "4"], "--redundant has no effect with --placement"),
        (["--placement", "OTHER"], "has 1 MoE layers of 8 experts, but"),
        (["--placement", "nowhere.yaml"], "cannot read nowhere.yaml"),
        (["--ranks", "4", "--out", "no/such/folder.yaml"], "--out: cannot write no/such/folder.yaml"),
        (["--ranks", "4", "--out", "placement.toml"], "--out placement.toml: a placement's name ends with .yaml or"),
        (["--ranks", "4", "--redundant", "100000000"], "100000000 redundant experts are too many: with 48, each of 4"),
        (["--ranks", "1000000000"], "--ranks 1000000000: it should be at most 1024"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    words: list[str], says: str, loads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = loads.with_name("other.yaml")
    ExpertPlacement.default(1, 8, 2).save(other)
    assert main(["eplb", str(loads), *[str(other) if word == "OTHER" else word for word in words]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_loads_without_tokens_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_loads(tmp_path / "none.npy", np.zeros((2, 1, 4)))
    assert main(["eplb", str(tmp_path / "none.npy"), "--ranks", "2"]) == 2
    assert "no tokens to plan for" in capsys.readouterr().err
