"""Which back ends `auto` takes on a GPU: by told times, on a CPU, with stand-ins for flashinfer."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture
from fastest_cases import told
from flashinfer_cases import install
from flashinfer_standin import StandIns
from flashinfer_standin_wrappers import cutlass_fused_moe
from request_steps import admitted, prefill
from runner_graph_cases import TINY, make_checkpoint

import attention.backends.registry
import moe.experts.registry
from attention import AttentionShape, MLAShape, make_kv_cache, resolve_attention_backend
from attention.backends import registry
from model_runner import Checkpoint, ModelRunner
from model_runner.backend_choice import _choose, resolve_attention, resolve_experts, resolve_fp8_blocks
from model_runner.models.registry import read_model
from model_runner.weights.quantization import WeightQuantization
from moe import All2All, ExpertsNeeds, ExpertsShape, experts_backends, fastest_experts, make_all2all, usable_experts
from moe.experts import flashinfer
from moe.experts.flashinfer import FlashInferExperts
from ranks import run_ranks
from ubatch import SCHEDULES, CommGroup, ConfigError, PeerFailed, UBatchConfig
from ubatch.kernels import Chosen, autotuner

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
SHAPE = ExpertsShape(held=4, num_experts=4, top_k=2, hidden_size=32, intermediate_size=16)
MHA = AttentionShape(4, 2, 16)
MLA = MLAShape(num_heads=2, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
TRITON, FLASHINFER, GROUPED_MM = "triton", "flashinfer", "grouped_mm"
TIMES = {TRITON: (3.0, 1.0), FLASHINFER: (1.0, 1.0), GROUPED_MM: (2.0, 1.0)}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIns:
    """Everything that a GPU would have, on the CPU: flashinfer by its stand-ins, Triton in its interpreter."""
    told(monkeypatch, tmp_path, {**TIMES, "native": (9.0,), "torch": (9.0,)})
    monkeypatch.setattr(moe.experts.registry, "_GPU_TOKENS", (2, 5))
    monkeypatch.setattr(attention.backends.registry, "_DECODE", (2, 20))
    monkeypatch.setattr(attention.backends.registry, "_PREFILL", (2, 5))
    monkeypatch.setattr(flashinfer, "find_fused_moe", lambda: cutlass_fused_moe)
    monkeypatch.setattr(FlashInferExperts, "devices", ("cpu",))
    standins = StandIns()
    install(monkeypatch, standins.find)
    monkeypatch.setattr(registry, "_candidates", lambda shape, device: ["flashinfer", "triton", "torch"])
    return standins


checkpoint = checkpoint_fixture(make_checkpoint)


# ------------------------------------------------------------------------------------------------------------- experts


def resolve(checkpoint: Path, name: str = "auto", **options: Any) -> str:
    config = read_model(Checkpoint(checkpoint))[1]
    transport = make_all2all("local", group=None, num_experts=TINY.num_experts)
    return resolve_experts(name, config, options.pop("all2all", transport), torch.float32, CPU, **options)


def in_blocks() -> All2All:
    """A transport that sends blocks, as torch_dist."""
    transport = make_all2all("local", group=None, num_experts=TINY.num_experts)
    transport.traits = replace(transport.traits, sends_blocks=True)
    return transport


def test_flashinfers_experts_are_chosen_where_they_are_the_fastest(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "model_runner"):
        assert resolve(checkpoint) == FLASHINFER
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "experts back end: flashinfer, fastest of triton, flashinfer, grouped_mm with 2 tokens and 5 tokens on this "
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TIMES)
def test_whoever_is_the_fastest(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    told(monkeypatch, tmp_path, {**TIMES, name: (0.5, 0.5)})
    assert resolve(checkpoint) == name


@pytest.mark.parametrize("block", [(128, 128), (64, 64)])
def test_experts_stored_in_fp8_stay_so_whoever_is_the_fastest(
    block: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path, replace(TINY, hidden_size=128, moe_intermediate_size=128))
    with caplog.at_level(logging.INFO, "model_runner"):
        name = resolve(path, quantization=WeightQuantization("fp8", ("_scale_inv",), block))
    assert name == (TRITON if block == (128, 128) else FLASHINFER)
    left_out = "experts back end flashinfer is left out: it needs the fp8 experts in torch.float32"
    assert (left_out in caplog.messages) == (name == TRITON)


def test_a_signalled_schedule_gets_dequantised_experts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint(tmp_path, replace(TINY, hidden_size=128, moe_intermediate_size=128))
    config = read_model(Checkpoint(path))[1]
    stored = WeightQuantization("fp8", ("_scale",), (128, 128))
    for schedule, block in (("single_batch", (128, 128)), ("single_batch_signalled", None)):
        dbo = UBatchConfig(schedule=replace(SCHEDULES[schedule], comm_sms=0))
        with caplog.at_level(logging.INFO, "model_runner"):
            assert resolve_fp8_blocks(TRITON, config, stored, torch.float32, CPU, dbo=dbo).experts == block
    assert "no down projection in fp8 signals its blocks" in caplog.messages[-1]


def test_any_other_name_is_itself(checkpoint: Path) -> None:
    assert resolve(checkpoint, "reference") == "reference"


def test_what_is_missing_is_left_out_and_named(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise ConfigError("flashinfer.fused_moe cannot be imported.")

    monkeypatch.setattr(flashinfer, "find_fused_moe", missing)
    with caplog.at_level(logging.INFO, "model_runner"):
        assert resolve(checkpoint) == GROUPED_MM
    assert caplog.records[0].getMessage() == (
        "experts back end flashinfer is left out: flashinfer.fused_moe cannot be imported."
    )


def test_only_ours_take_batches_by_expert_and_signal(checkpoint: Path) -> None:
    batched = usable_experts(SHAPE, torch.float32, CPU, ExpertsNeeds(batched=True))
    assert {name: why is None for name, why in batched.items()} == {TRITON: True, FLASHINFER: False, GROUPED_MM: False}
    assert batched[FLASHINFER] == "takes no rows in batches by expert, as the transport brings them"
    signalled = usable_experts(SHAPE, torch.float32, CPU, ExpertsNeeds(signals=True))
    assert [name for name, why in signalled.items() if why is None] == [TRITON]
    schedule = replace(SCHEDULES["single_batch_signalled"], comm_sms=16)
    assert resolve(checkpoint, dbo=UBatchConfig(schedule=schedule)) == TRITON


def test_a_signalled_schedule_over_a_transport_that_sends_blocks_gets_experts_in_blocks(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transport = in_blocks()
    signalled = UBatchConfig(schedule=replace(SCHEDULES["single_batch_signalled"], comm_sms=0))
    with caplog.at_level(logging.INFO, "model_runner"):
        assert resolve(checkpoint, all2all=transport, dbo=signalled) == "grouped"
    assert [record.getMessage() for record in caplog.records[:3]] == [
        f"experts back end {name} is left out: runs all at once, but a schedule and the transport want blocks"
        for name in TIMES
    ]
    assert resolve(checkpoint, all2all=transport, dbo=UBatchConfig(schedule="single_batch")) == FLASHINFER


def test_where_sms_are_reserved_auto_takes_experts_that_leave_them(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "model_runner"):
        assert resolve(checkpoint, dbo=UBatchConfig(comm_sms=8)) == TRITON
    takes_all = "takes all SMs, though a schedule reserves some for communication (comm_sms)"
    assert [record.getMessage() for record in caplog.records] == [
        f"experts back end flashinfer is left out: {takes_all}",
        f"experts back end grouped_mm is left out: {takes_all}",
        "experts back end: triton, the only one that can run here",
    ]
    assert resolve(checkpoint, dbo=UBatchConfig(comm_sms=0)) == FLASHINFER
    assert resolve(checkpoint, dbo=UBatchConfig(comm_sms=8, enable_dbo=False)) == FLASHINFER
    assert resolve(checkpoint, dbo=UBatchConfig(comm_sms=8, schedule="serial")) == FLASHINFER


@pytest.mark.parametrize(("name", "warned"), [(GROUPED_MM, 1), (FLASHINFER, 1), ("grouped", 1), (TRITON, 0)])
def test_experts_by_name_that_take_reserved_sms_are_warned_of(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, name: str, warned: int
) -> None:
    assert resolve(checkpoint, name, dbo=UBatchConfig(comm_sms=8)) == name
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
    assert all(f"{name} takes all SMs, though" in record.getMessage() for record in caplog.records)
    caplog.clear()
    assert resolve(checkpoint, name, dbo=UBatchConfig()) == name
    assert not caplog.records


def test_in_blocks_there_are_no_experts_that_leave_sms(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve(checkpoint, all2all=in_blocks(), dbo=UBatchConfig(schedule="single_batch_signalled")) == "grouped"
    assert "grouped takes all SMs, though" in caplog.text


def test_where_none_can_do_what_is_needed_auto_says_so(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it was `grouped`, and every step was refused."""
    monkeypatch.setattr(moe.experts.registry, "_CANDIDATES", (FLASHINFER,))
    signalled = UBatchConfig(schedule="single_batch_signalled")
    with pytest.raises(ConfigError, match=r"auto finds no experts back end .* grouped: does not signal, as a schedule"):
        resolve(checkpoint, dbo=signalled)


def test_where_none_of_them_can_run_it_is_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe.experts.registry, "_CANDIDATES", (FLASHINFER,))
    monkeypatch.setattr(FlashInferExperts, "devices", ("cuda",))
    assert usable_experts(SHAPE, torch.float32, CPU) == {
        FLASHINFER: "flashinfer experts run on cuda, not on cpu.",
        "grouped": None,
    }


# ----------------------------------------------------------------------------------------------------------- attention


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [MHA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize(("times", "name"), [((2.0,), "flashinfer"), ((0.5,), "triton")])
def test_prefill_and_decode_are_measured_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: Any, times: tuple[float, ...], name: str
) -> None:
    timer = told(monkeypatch, tmp_path, {"flashinfer": (1.0,), "triton": times})
    cache = make_kv_cache(shape.cache_spec(1, 16, torch.float32), 3)
    assert resolve_attention_backend("auto", shape, cache) == name
    assert len(timer.timed) == 2
    monkeypatch.setattr(timer, "times", {"flashinfer": (1.0,), "triton": (1.5,)})
    assert resolve_attention("auto", "auto", shape, cache) == ("flashinfer", name)
    assert len(timer.timed) == 4, "decode's is remembered"
    assert not any(pool.memory.any() for pool in cache._pools), "the cache may hold tokens"


def test_torch_is_no_candidate_beside_what_can_be_captured() -> None:
    cache = make_kv_cache(MHA.cache_spec(1, 16, torch.float32), 3)
    assert registry.usable_attention_backends(MHA, cache) == {"flashinfer": None, "triton": None}


# ----------------------------------------------------------------------------------------------------- a whole runner


def test_a_runner_takes_what_was_measured_and_computes_the_same(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before the change its experts were Triton's whatever was installed."""
    options: dict[str, Any] = {"num_kv_blocks": 8, "block_size": 16}

    def first_tokens(runner: ModelRunner) -> list[int]:
        (request,) = admitted(runner, [[5, 6, 7]], 1)
        prefill(runner, [request])
        return request.output_token_ids

    told(monkeypatch, tmp_path, {"flashinfer": (1.0, 1.0), "triton": (2.0, 2.0), "grouped_mm": (3.0, 3.0)})
    with ModelRunner(checkpoint, **options) as runner:
        assert isinstance(runner.model.layers[0].mlp.kernel.experts, FlashInferExperts)
        assert (runner.attention.prefill_name, runner.attention.decode_name) == ("flashinfer", "flashinfer")
        measured = first_tokens(runner)
    with ModelRunner(checkpoint, **options, experts_backend="reference", attention_backend="torch") as runner:
        assert first_tokens(runner) == measured


@pytest.mark.gpu
def test_on_a_gpu_what_was_measured_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With whatever is installed there; a second process, as it were, times nothing."""
    monkeypatch.undo()
    monkeypatch.setenv("UBATCH_AUTOTUNE_CACHE", str(tmp_path / "gpu.json"))
    shape, place = replace(SHAPE, hidden_size=512, intermediate_size=256), torch.device("cuda")
    usable = usable_experts(shape, torch.bfloat16, place)
    names = [name for name, why_not in usable.items() if why_not is None]
    first = fastest_experts(names, shape, torch.bfloat16, place).name
    assert first in names
    autotuner._process_wide.cache_clear()
    monkeypatch.setattr(autotuner.CudaTimer, "seconds", lambda *_: pytest.fail("timed again"))
    assert fastest_experts(names, shape, torch.bfloat16, place).name == first


# ------------------------------------------------------------------------------------------------------- several ranks


def _choose_on_rank(rank: int, world_size: int, usable: list[dict[str, str | None]], found: list[str]) -> str:
    group = CommGroup.from_process_group(timeout_s=10.0)

    def fastest(names: Any) -> Chosen:
        if found[rank] == "error":
            raise ConfigError("none of them works here")
        return Chosen(found[rank] if found[rank] in names else names[0], "fastest of some")

    return _choose("experts back end", experts_backends(), usable[rank], fastest, group)


ALL: dict[str, str | None] = dict.fromkeys(TIMES)


def test_all_ranks_take_what_the_first_one_found() -> None:
    assert run_ranks(_choose_on_rank, 2, [ALL, ALL], [GROUPED_MM, FLASHINFER]) == [GROUPED_MM] * 2


def test_what_one_rank_cannot_use_no_rank_takes() -> None:
    lacking = {**ALL, FLASHINFER: "not installed"}
    assert run_ranks(_choose_on_rank, 2, [ALL, lacking], [FLASHINFER, GROUPED_MM]) == [TRITON] * 2


def _choose_where_some_fail(
    rank: int, world_size: int, found: list[list[str]], failing: list[list[str]]
) -> tuple[str, list[list[str]]]:
    """`found` is what is fastest, best first; what was measured, in turn, comes back, too."""
    measured: list[list[str]] = []

    def fastest(names: Any) -> Chosen:
        measured.append(list(names))
        working = [name for name in found[rank] if name in names and name not in failing[rank]]
        if len(names) == 1 or not working:  # as `ubatch.kernels.candidates`: what is left alone is not tried
            return Chosen(names[0], "the only one that can run here")
        return Chosen(working[0], "fastest of some", lambda name: name not in failing[rank])

    group = CommGroup.from_process_group(timeout_s=10.0)
    try:
        return _choose("experts back end", experts_backends(), ALL, fastest, group), measured
    except ConfigError as error:
        return str(error), measured


@pytest.mark.parametrize(
    ("failing", "chosen", "measured"),
    [
        ([[], [FLASHINFER]], GROUPED_MM, [[*TIMES], [TRITON, GROUPED_MM]]),
        ([[GROUPED_MM], [FLASHINFER]], TRITON, [[*TIMES], [TRITON]]),
        ([[], [GROUPED_MM]], FLASHINFER, [[*TIMES]]),
    ],
    ids=["on another rank", "on each another one", "but not the one taken"],
)
def test_what_fails_on_a_rank_no_rank_takes(failing: list[list[str]], chosen: str, measured: list[list[str]]) -> None:
    """Before, all took what rank 0 had found, and the other rank failed when it made its experts."""
    order = [[FLASHINFER, GROUPED_MM, TRITON], [TRITON, GROUPED_MM, FLASHINFER]]
    assert run_ranks(_choose_where_some_fail, 2, order, failing) == [(chosen, measured)] * 2


def test_ranks_on_which_nothing_works_everywhere_say_so() -> None:
    failing = [[TRITON, GROUPED_MM], [FLASHINFER]]
    for error, _ in run_ranks(_choose_where_some_fail, 2, [[FLASHINFER], [TRITON]], failing):
        assert error.startswith("auto finds no experts back end that every rank can use (")
        assert "triton: it fails when it is tried, here or on another rank" in error


def _failure_on_rank(rank: int, world_size: int) -> str:
    try:
        return _choose_on_rank(rank, world_size, [ALL, ALL], [TRITON, "error"])
    except (ConfigError, PeerFailed) as error:
        return f"{type(error).__name__}: {error}"


def test_a_rank_on_which_none_works_fails_all_of_them() -> None:
    first, second = run_ranks(_failure_on_rank, 2)
    assert second == "ConfigError: none of them works here"
    assert first.startswith("PeerFailed: ")
    assert "none of them works here" in first


def test_ranks_that_share_no_usable_back_end_say_so() -> None:
    with pytest.raises(ConfigError, match=r"auto finds no experts back end .*\(flashinfer: not installed\).*by name"):
        _choose(
            "experts back end", experts_backends(), {FLASHINFER: "not installed"}, lambda names: Chosen("", ""), None
        )
