"""Transports and their options as settings: what is chosen and why, what follows from the steps, what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import deep_ep_standin
import pytest
import torch
from repository import TINY_MOE

from model_runner import ModelRunner, Step
from model_runner.graphs.runner_graphs import capturable_families
from model_runner.parallel.expert_parallel import check_schedules, most_chunks
from model_runner.step.graph_sizes import graph_families
from moe import StepSizes, check_all2all_options, check_schedule, default_all2all_options, make_all2all, traits_in
from serving.engine.rank.build import describe_transport
from serving.options import SERVE, Settings, describe_settings, resolve_settings, to_engine_options
from serving.options.sources import Source, read_file, read_keywords, read_layers
from serving.workbench.arms.stages import ArmSteps, LayerStages, NoStageTimes
from serving.workbench.bench.runtime.schedules import Options, _search
from serving.workbench.bench.step_setting import StepSetting
from ubatch import CommGroup, ConfigError, ForwardMode, ModeSettings, UBatchConfig, get_schedule
from ubatch.schedules.lane_program import LayerTimes

TINY = str(TINY_MOE)
EP = ("--data-parallel-size", "2", "--enable-expert-parallel")
GPUS, CPU = {"gpus": 2}, {"gpus": 0}
TRITON = "triton", torch.device("cpu")
DECODE, PREFILL, VERIFY = ForwardMode.DECODE, ForwardMode.PREFILL, ForwardMode.TARGET_VERIFY


def resolve(*words: str, machine: dict[str, int] = GPUS) -> Settings:
    return resolve_settings(*read_layers(SERVE, "ubatch serve", "", [TINY, *words])[0], **machine)


@contextmanager
def group_of(ranks: int) -> Iterator[CommGroup]:
    """A group that nobody sends anything over, next to the stand-in for DeepEP."""
    group = cast(CommGroup, mock.create_autospec(CommGroup, instance=True))
    group.rank, group.size = 0, ranks
    with deep_ep_standin.installed():
        yield group


# -- options ---------------------------------------------------------------------------------------------------------


def test_options_come_from_the_line_a_file_and_python(tmp_path: Path) -> None:
    wanted = {"max_tokens_per_rank": 64, "use_fp8": True}
    words = ("--all2all-backend", "deepep_auto", "--all2all-options", "max-tokens-per-rank=64", "use_fp8=true")
    from_line = resolve(*EP, *words)
    assert to_engine_options(from_line).all2all_options == wanted
    keywords = {"model": TINY, "data_parallel_size": 2, "enable_expert_parallel": True}
    from_python = read_keywords(keywords | {"all2all_backend": "deepep_auto", "all2all_options": wanted})
    assert to_engine_options(resolve_settings(from_python, **GPUS)).all2all_options == wanted
    file = tmp_path / "serve.yaml"
    file.write_text("all2all-options: {max-tokens-per-rank: 64, use_fp8: true}\n")
    assert read_file(file)["all2all_options"].value == wanted


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e3", 1000.0), ("-3", -3), ("0.5", 0.5), ("True", True), (": :", ": :"), ('"', '"'), ("[1", "[1"), ("a", "a")],
)
def test_values_are_numbers_truths_or_text(text: str, value: object) -> None:
    layers, _ = read_layers(SERVE, "ubatch serve", "", [TINY, "--all2all-options", f"x={text}"])
    read = layers[-1]["all2all_options"].value["x"]
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    ("name", "options", "ranks", "complaint"),
    [
        ("deepep_v2", {}, 12, "'deepep_v2' serves up to 8 ranks, or whole nodes of 8 each, not 12"),
        ("deepep_auto", {"worst_case": True}, 16, "without counts inside one node of 8 ranks, but the group has 16"),
        ("deepep_auto", {"share_buffer": False}, 16, "share_buffer=False: beyond one node of 8 ranks"),
        ("host_loopback", {"sms": -3}, 1, "sms must be at least 0"),
        ("host_loopback_batched", {"bytes_factor": 0}, 1, "bytes_factor must be at least 1"),
    ],
)
def test_values_and_ranks_are_checked_without_a_rank(
    name: str, options: dict[str, object], ranks: int, complaint: str
) -> None:
    if "batched" in name:
        pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")
    with pytest.raises(ConfigError, match=complaint):
        check_all2all_options(name, options, ranks)


@pytest.mark.parametrize(
    ("name", "sizes", "ranks", "options"),
    [
        ("deepep_low_latency", StepSizes(256, 2048), 2, {"max_tokens_per_rank": 256}),
        ("deepep_low_latency", StepSizes(9), 2, {"max_tokens_per_rank": 10}),  # times 2 ranks a multiple of 4
        ("deepep_low_latency", StepSizes(9), 3, {"max_tokens_per_rank": 12}),
        ("deepep_low_latency", StepSizes(1024), 2, {"max_tokens_per_rank": 510}),  # what the queues are deep enough for
        ("deepep_auto", StepSizes(256, 2048, captured=True), 8, {"max_tokens_per_rank": 256}),
        ("deepep_auto", StepSizes(1024, captured=True), 8, {"max_tokens_per_rank": 511, "worst_case": True}),
        ("deepep_auto", StepSizes(1024, captured=True), 16, {"max_tokens_per_rank": 511, "worst_case": False}),
        ("deepep_high_throughput", StepSizes(256, captured=True), 8, {"worst_case": True}),
        ("deepep_high_throughput", StepSizes(256, captured=True), 16, {"worst_case": False}),
        ("deepep_v2", StepSizes(256, 8192, captured=True), 16, {"max_tokens_per_rank": 8192, "worst_case": True}),
        ("deepep_v2", StepSizes(256), 2, {"worst_case": False}),
        ("torch_dist", StepSizes(256, 8192, captured=True), 2, {}),
    ],
)
def test_options_follow_from_the_steps(name: str, sizes: StepSizes, ranks: int, options: dict[str, Any]) -> None:
    assert default_all2all_options(name, sizes, ranks) == options


# -- what can be captured --------------------------------------------------------------------------------------------


def test_auto_is_judged_by_the_way_that_a_step_goes() -> None:
    with group_of(2) as group:
        auto = make_all2all("deepep_auto", group=group, num_experts=8, max_tokens_per_rank=64)
        assert traits_in(auto, DECODE, 64).capturable
        assert traits_in(auto, VERIFY, 64).capturable
        assert not traits_in(auto, DECODE, 65).capturable, "high throughput, which waits for counts"
        assert not traits_in(auto, PREFILL, 64).capturable
        without_counts = make_all2all("deepep_auto", group=group, num_experts=8, worst_case=True)
        assert traits_in(without_counts, PREFILL, 4096).capturable
        assert not traits_in(make_all2all("torch_dist", group=group, num_experts=8), DECODE, 1).capturable


def test_steps_that_do_not_fit_are_not_captured_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    families = graph_families((32, 64, 128), UBatchConfig(dbo_decode_token_threshold=128), num_speculative_tokens=1)
    with group_of(2) as group:
        auto = make_all2all("deepep_auto", group=group, num_experts=8, max_tokens_per_rank=64)
        with caplog.at_level(logging.WARNING):
            kept = capturable_families(families, auto, "auto")
        advice = "Raise max_tokens_per_rank or set worst_case among the all2all options (--all2all-options)"
        assert "decode steps of 128 tokens or more" in caplog.text
        assert advice in caplog.text
        shapes = {(shape.mode, shape.lanes, shape.lane_tokens) for family in kept for shape in family.shapes}
        assert shapes == {(DECODE, 1, 32), (DECODE, 1, 64), (DECODE, 2, 64), (VERIFY, 1, 64), (VERIFY, 2, 64)}
        with pytest.raises(ConfigError, match="cudagraph_mode full: decode steps of 128 tokens or more"):
            capturable_families(families, auto, "full")
        assert capturable_families(families, auto, "full", tensor_parallel_size=4) == families
        roomy = make_all2all("deepep_auto", group=group, num_experts=8, max_tokens_per_rank=256)
        assert capturable_families(families, roomy, "full") == families


def test_an_overlapped_step_is_replayed_where_a_plain_one_has_no_room() -> None:
    """Room for 511 tokens: no plain graph of 512 requests, but one of 2 x 256."""
    (family,) = graph_families((496, 512), UBatchConfig(dbo_decode_token_threshold=64))
    with group_of(16) as group:
        auto = make_all2all("deepep_auto", group=group, num_experts=16, max_tokens_per_rank=511)
        (kept,) = capturable_families([family], auto, "auto")
    assert (kept.max_requests(), kept.max_requests(plain=True)) == (512, 496)
    assert kept.fit(2, 256) is not None
    assert kept.fit(1, 512) is None


def test_schedules_that_a_way_cannot_serve_are_refused_before_any_step() -> None:
    config = UBatchConfig(schedule="single_batch")
    with group_of(2) as group:
        auto = make_all2all("deepep_auto", group=group, num_experts=8, share_buffer=True)
        assert most_chunks(auto) == 1
        with pytest.raises(ConfigError, match=r"^decode steps: schedule 'single_batch' has 2 chunks, but .* serves 1"):
            check_schedules(config, auto, *TRITON, verifies=False)
        check_schedules(replace(config, modes={"decode": ModeSettings("serial")}), auto, *TRITON, verifies=False)
        check_schedules(config, make_all2all("deepep_auto", group=group, num_experts=8), *TRITON, verifies=True)


@pytest.mark.parametrize(
    ("name", "experts", "device", "complaint"),
    [
        ("local", "grouped", "cpu", "LocalAll2All cannot do"),
        ("host_loopback", "grouped", "cpu", "HostLoopbackAll2All cannot do"),
        ("torch_dist", "reference", "cpu", "ReferenceExperts run all at once"),
        ("torch_dist", "grouped", "cpu", None),
        ("host_loopback_batched", "grouped", "cpu", "GroupedExperts do not say what is done"),
        ("host_loopback_batched", "triton_batched", "cuda", "has no SMs of its own"),
        ("host_loopback_batched", "triton_batched", "cpu", None),
    ],
)
def test_a_schedule_that_nobody_can_signal_is_refused_before_any_step(
    name: str, experts: str, device: str, complaint: str | None
) -> None:
    if "batched" in name:
        pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")
    config = UBatchConfig(schedule=replace(get_schedule("single_batch_signalled"), comm_sms=0))
    with group_of(1 if "host" in name or name == "local" else 2) as group:
        check = partial(check_schedules, config, make_all2all(name, group=group, num_experts=8), experts)
        if complaint is None:
            check(torch.device(device), verifies=True)
            return
        with pytest.raises(ConfigError, match=rf"^decode steps: schedule 'single_batch_signalled' .*{complaint}"):
            check(torch.device(device), verifies=True)


def test_a_runner_refuses_a_schedule_that_nobody_can_signal() -> None:
    with pytest.raises(ConfigError, match=r"decode steps: .* LocalAll2All cannot do"):
        ModelRunner(TINY, dbo=UBatchConfig(schedule="single_batch_signalled"), num_kv_blocks=8)


def runner_over(all2all: Any) -> ModelRunner:
    config = SimpleNamespace(num_experts=8, num_experts_per_tok=2, hidden_size=2048)
    cache = SimpleNamespace(spec=SimpleNamespace(dtype=torch.bfloat16))
    runner = {"all2all": all2all, "config": config, "kv_cache": cache, "group": all2all.group}
    return cast(ModelRunner, SimpleNamespace(**runner, tensor_parallel_size=1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "tokens", "cuts"), [(DECODE, 100, None), (VERIFY, 1000, None), (DECODE, 4096, False), (PREFILL, 64, False)]
)
def test_the_search_proposes_only_what_a_way_serves(
    mode: ForwardMode, tokens: int, cuts: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = LayerTimes(attn_core=1e-3, experts=1e-3, dispatch=1e-3, combine=1e-3)
    measured = LayerStages({"": times}, ("",) * 4)
    monkeypatch.setattr(ArmSteps, "_stages", lambda *_: measured)
    batch = cast(Step, SimpleNamespace(mode=mode, num_tokens=tokens))
    with group_of(2) as group:
        auto = make_all2all("deepep_auto", group=group, num_experts=8, max_tokens_per_rank=128)
        model = ArmSteps(runner_over(auto)).stage_model(batch)
        assert model.traits.cuts_combine is cuts
        assert model.traits.per_expert == (tokens < 256 and mode is not PREFILL), "of the way that is measured"
        for found in model.search(max_lanes=4, max_chunks=2, keep=99):
            lane = -(-tokens // found.schedule.lanes)
            check_schedule(found.schedule, auto, traits_in(auto, mode, lane))


@pytest.mark.parametrize(
    ("name", "ranks", "experts", "why"),
    [
        ("torch_dist", 1, 8, "there is one rank"),
        ("torch_dist", 2, 0, "the model is dense"),
        ("deepep_low_latency", 2, 8, "up to 4 lanes, and DeepEPLowLatencyAll2All serves 3"),
        ("torch_dist", 2, 8, "with 2 lanes, and a step of 3 tokens in 1 requests is not split"),
    ],
)
def test_why_there_is_no_search(name: str, ranks: int, experts: int, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArmSteps, "run", lambda *_: False)
    monkeypatch.setattr("serving.workbench.arms.stages.most_lanes", lambda all2all: 3 if "low" in name else None)
    batch = cast(Step, SimpleNamespace(num_tokens=3, shares=(None,)))
    with group_of(ranks) as group:
        runner = runner_over(make_all2all(name, group=group, num_experts=8))
        runner.config.num_experts = experts
        with pytest.raises(NoStageTimes, match=why):
            ArmSteps(runner).search(batch, lambda model: [])


def test_a_search_may_find_nothing_but_serial(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with one lane and one chunk."""
    monkeypatch.setattr(ArmSteps, "search", lambda *_: [])
    setting = cast(StepSetting, SimpleNamespace(runner=None, link=None, batch=None))
    assert _search(setting, Options(max_lanes=1, max_chunks=1)) == []


def test_the_log_says_what_a_transport_does_in_each_mode() -> None:
    with group_of(2) as group:
        decode, prefill = describe_transport(runner_over(make_all2all("deepep_auto", group=group, num_experts=8)))
        assert decode.startswith("DeepEPAutoAll2All, decode: travels during compute; no wait on the host; capturable")
        assert decode.endswith("room for 128 tokens of a rank")
        assert prefill.startswith(
            "DeepEPAutoAll2All, prefill: travels during compute; the host waits for counts; eager"
        )
        (line,) = describe_transport(runner_over(make_all2all("torch_dist", group=group, num_experts=8)))
        assert line.startswith("TorchDistAll2All: travels during compute; the host waits for counts; eager only")


# -- what auto is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "machine", "name", "why"),
    [
        ("", GPUS, "allgather_reducescatter", "ranks of one machine over NCCL"),
        ("--all2all-backend auto", GPUS, "allgather_reducescatter", "can be captured"),
        ("--nnodes 2 --master-addr 10.0.0.1 --master-port 29500", GPUS, "torch_dist", "several machines"),
        ("", CPU, "torch_dist", "rows travel only to ranks that hold their experts"),
    ],
)
def test_auto_says_what_it_chose_and_why(words: str, machine: dict[str, int], name: str, why: str) -> None:
    settings = resolve(*EP, *words.split(), machine=machine)
    assert settings.all["all2all_backend"].source is Source.DERIVED
    assert to_engine_options(settings).all2all_backend == name
    line = next(line for line in describe_settings(settings).splitlines() if line.startswith("all2all-backend:"))
    assert json.dumps(name) in line
    assert why in line
