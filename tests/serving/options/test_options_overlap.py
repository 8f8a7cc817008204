"""Which schedule a server runs in which mode: from flags, from a file, and from both overlap flags together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_checkpoint import DenseQwen3
from repository import ROOT

from model_runner import make_random_qwen3_moe
from moe import FusedExperts
from serving.cli import main
from serving.engine.rank.build import make_runner
from serving.options import describe_settings, notes, read_serve_command, resolve_settings, to_engine_options
from serving.options.sources import read_file, read_keywords
from ubatch import SCHEDULES, ConfigError, ForwardMode, Schedule, UBatchConfig

TINY = str(ROOT / "examples" / "models" / "tiny-moe")
EP = ("--data-parallel-size", "2", "--enable-expert-parallel")
SBO = "--enable-single-batch-overlap"
DECODE, PREFILL, VERIFY = ForwardMode.DECODE, ForwardMode.PREFILL, ForwardMode.TARGET_VERIFY
FILE = """
enable-dbo: true
num-ubatches: 3
schedules:
  mine: {lanes: 4, chunks: 2, shared_expert: dispatch}
decode: {schedule: mine, token-threshold: 64}
prefill: {num_ubatches: 2}
"""


def dbo_of(*words: str) -> UBatchConfig:
    return to_engine_options(read_serve_command("ubatch serve", "", [TINY, *EP, *words]).settings).dbo


def in_force(config: UBatchConfig) -> list[tuple[str, int, int]]:
    schedules = [config.for_mode(mode).schedule for mode in (DECODE, PREFILL, VERIFY)]
    return [(each.name, each.lanes, each.chunks) for each in schedules]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    return path


def test_a_file_sets_each_mode_for_the_server_and_for_generate(file: Path) -> None:
    config = dbo_of("--config", str(file))
    assert in_force(config) == [("mine", 4, 2), ("mlp_shared_overlap", 2, 1), ("mlp_shared_overlap", 3, 1)]
    assert config.for_mode(DECODE).token_threshold == 64
    assert in_force(UBatchConfig.from_yaml(file)) == in_force(config)


def test_a_flag_beats_the_file_for_its_mode(file: Path) -> None:
    config = dbo_of("--config", str(file), "--schedule-decode", "two_batch_decode", "--schedule-verify", "mine")
    assert in_force(config) == [("two_batch_decode", 3, 1), ("mlp_shared_overlap", 2, 1), ("mine", 4, 2)]
    assert config.for_mode(DECODE).token_threshold == 64, "the rest of the mode's settings stay"
    plain = dbo_of("--enable-dbo", "--schedule", "two_batch_prefill", "--schedule-decode", "serial")
    assert in_force(plain) == [("serial", 1, 1), ("two_batch_prefill", 2, 1), ("two_batch_prefill", 2, 1)]


def test_single_batch_overlap_alone_is_one_lane_with_two_chunks() -> None:
    config = dbo_of(SBO, "--dbo-decode-token-threshold", "1")
    assert config.enable_dbo
    assert in_force(config) == [("single_batch", 1, 2)] * 3
    assert config.for_mode(DECODE).token_threshold == 1
    assert in_force(dbo_of(SBO, "--schedule-prefill", "serial")) == [("single_batch", 1, 2)] * 3
    signalled = dbo_of(SBO, "--schedule", "single_batch_signalled")
    assert in_force(signalled) == [("single_batch_signalled", 1, 1)] * 3, "it overlaps without chunks"


def test_with_two_batch_overlap_every_lane_has_two_chunks(file: Path) -> None:
    config = dbo_of(SBO, "--enable-two-batch-overlap", "--schedule-decode", "two_batch_decode")
    assert config.for_mode(DECODE).schedule == replace(
        SCHEDULES["two_batch_decode"], name="two_batch_decode_2_chunks", chunks=2
    )
    assert [row[1:] for row in in_force(config)] == [(2, 2)] * 3
    mine = dbo_of(SBO, "--config", str(file), "--schedule", "mine")
    assert in_force(mine) == [("mine", 4, 2), ("mine", 2, 2), ("mine", 4, 2)], "one's own stays as it is written"
    names = {schedule.name for schedule in SCHEDULES.values()}
    assert all(Schedule(f"{name}_2_chunks").name not in names for name in names)


def test_what_is_printed_is_read_back(file: Path, tmp_path: Path) -> None:
    words = [TINY, *EP, SBO, "--config", str(file), "--schedule-verify", "serial"]
    settings = read_serve_command("ubatch serve", "", words).settings
    again = tmp_path / "again.yaml"
    again.write_text(describe_settings(settings))
    read = resolve_settings(read_file(again))
    assert {name: setting.value for name, setting in read.all.items()} == {
        name: setting.value for name, setting in settings.all.items()
    }
    assert to_engine_options(read).dbo == to_engine_options(settings).dbo


def test_help_names_the_flags_but_not_what_only_a_file_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for flag in ("--schedule-decode STR", "--schedule-prefill STR", "--schedule-verify STR", SBO):
        assert flag in text
    for key in ("--decode", "--schedules", "--prefill ", "--verify"):
        assert f"{key} " not in text


def test_notes_know_both_flags(file: Path) -> None:
    def noted(*words: str) -> str:
        return " ".join(notes(read_serve_command("ubatch serve", "", [TINY, *words]).settings))

    assert f"{SBO} has no communication to hide" in noted(SBO)
    assert noted(*EP, SBO) == ""
    assert "--ubatch-size without --enable-dbo: one batch is not split" in noted(*EP, SBO, "--ubatch-size", "3")
    assert "--schedule-decode without --enable-dbo: no step overlaps" in noted(*EP, "--schedule-decode", "serial")


# ----------------------------------------------------------------------------------------- SMs, ranges, experts


def test_comm_sms_and_profile_ranges_reach_the_runtime() -> None:
    gpus = 2
    words = {"enable_dbo": True, "data_parallel_size": 2, "enable_expert_parallel": True, "comm_sms": 24}
    settings = resolve_settings(read_keywords({"model": TINY, **words}), gpus=gpus)
    config = to_engine_options(settings).dbo
    assert {config.for_mode(mode).schedule.comm_sms for mode in (DECODE, PREFILL, VERIFY)} == {24}
    assert not config.profile_ranges
    assert dbo_of("--enable-dbo", "--profile-ranges").profile_ranges
    assert dbo_of("--enable-dbo").comm_sms is None


def test_comm_sms_and_profile_ranges_may_be_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("enable-dbo: true\ncomm-sms: 0\nprofile-ranges: true\nmoe-backend: reference\n")
    options = to_engine_options(read_serve_command("ubatch serve", "", [TINY, *EP, "--config", str(file)]).settings)
    assert (options.dbo.comm_sms, options.dbo.profile_ranges, options.moe_backend) == (0, True, "reference")
    file.write_text("comm-sms: 0\nprofile-ranges: true\n")
    assert UBatchConfig.from_yaml(file).profile_ranges


def test_without_overlap_they_are_noted() -> None:
    settings = read_serve_command("ubatch serve", "", [TINY, "--profile-ranges", "--device", "cpu"]).settings
    assert any("--profile-ranges without --enable-dbo: no step overlaps" in line for line in notes(settings))


def test_the_experts_back_end_reaches_the_runner() -> None:
    options = to_engine_options(
        read_serve_command("ubatch serve", "", [TINY, "--moe-backend", "reference", "--device", "cpu"]).settings
    )
    with make_runner(replace(options, kv_cache_memory=1 << 20)) as runner:
        experts = {type(each).__name__ for each in runner.model.modules() if isinstance(each, FusedExperts)}
    assert experts == {"ReferenceExperts"}


def test_a_dense_model_has_no_experts_to_choose_for(tmp_path: Path) -> None:
    make_random_qwen3_moe(tmp_path, 0, size=DenseQwen3(), dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"--moe-backend grouped: the checkpoint is a dense model\."):
        read_serve_command("ubatch serve", "", [str(tmp_path), "--moe-backend", "grouped", "--device", "cpu"])
