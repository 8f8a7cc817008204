"""Settings of `ubatch serve`: which source counts, what follows from what, what the engine gets, and what is shown."""

import json
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from calls import words_of
from hypothesis import given
from hypothesis import strategies as st
from repository import MODELS, ROOT, TINY_MOE

from model_runner.speculation import Acceptance
from serving.cli import main
from serving.engine.speculation import Algorithm, SpeculationConfig
from serving.options import (
    SERVE,
    Settings,
    Source,
    describe_settings,
    notes,
    read_layers,
    read_serve_command,
    resolve_keywords,
    resolve_settings,
    to_engine_options,
)
from serving.options.flags.fields import parse_bytes
from serving.options.flags.server_flags import Speculation
from serving.options.overlap import measured_kinds
from serving.options.sources import read_file, read_keywords
from serving.scheduler import SchedulingPolicy
from ubatch import SCHEDULES, ConfigError, ForwardMode, UBatchConfig
from ubatch.schedules.modes import MODE_KEYS

TINY, HEAD = str(TINY_MOE), MODELS / "tiny-moe-eagle"
EXAMPLE = ROOT / "examples" / "dbo.yaml"
OVERLAP_FILE = """
enable-dbo: true
num-ubatches: 3
schedules:
  mine: {lanes: 4, chunks: 2, shared_expert: dispatch}
decode: {schedule: mine, token-threshold: 64}
prefill: {num_ubatches: 2}
"""


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file `serve.yaml` of the folder that every test runs in."""
    monkeypatch.chdir(tmp_path)
    return Path("serve.yaml")


def resolved(call: str) -> Settings:
    """The settings of `serve TINY` with these words."""
    words, gpus = words_of(call)
    return resolve_settings(*read_layers(SERVE, "ubatch serve", "", [TINY, *words])[0], gpus=gpus)


# -- which source counts: for every setting, see test_settings ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "in_file", "words", "from_file", "from_line"),
    [
        ("port", "port: 9000", "--port=9001", 9000, 9001),
        ("enable_dbo", "enable-two-batch-overlap: true", "--no-enable-dbo", True, False),
        ("enable_dbo", "enable_dbo: true", "--no-enable-two-batch-overlap", True, False),
        ("ubatch_size", "num-ubatches: 3", "--ubatch_size 4", 3, 4),
        ("tensor_parallel_size", "tensor-parallel-size: 4\nenable-expert-parallel: true", "-tp 2", 4, 2),
        ("tensor_parallel_size", "tensor-parallel-size: 4\nenable-expert-parallel: true", "-tp=2", 4, 2),
        ("max_waiting_requests", "max-waiting-requests: 5", "--max-waiting-requests None", 5, None),
        ("api_key", "api-key: of-the-file", "--api-key of-the-line", "of-the-file", "of-the-line"),
        ("max_prefill_tokens_per_mixed_step", "max-prefill-tokens-per-mixed-step: off", "MIXED 64", "off", 64),
        ("max_prefill_tokens_per_mixed_step", "max-prefill-tokens-per-mixed-step: 'off'", "MIXED auto", "off", "auto"),
        ("max_prefill_tokens_per_mixed_step", "max-prefill-tokens-per-mixed-step: 128", "MIXED off", 128, "off"),
        ("served_model_name", "served-model-name: [a, a]", "--served-model-name b", "a", "b"),
        (
            "served_model_name",
            "served-model-name: [b, a, b]",
            "--served-model-name a --served-model-name b --served-model-name a",
            ("b", "a"),
            ("a", "b"),
        ),
    ],
)
def test_command_line_beats_file_beats_default(
    file: Path, name: str, in_file: str, words: str, from_file: Any, from_line: Any
) -> None:
    file.write_text(in_file + "\n")
    filed, both = resolved("--config serve.yaml"), resolved(f"{words} --config serve.yaml")
    assert (filed[name], filed.all[name].source) == (from_file, Source.FILE)
    assert (both[name], both.all[name].source) == (from_line, Source.COMMAND_LINE)


def test_environment_stands_between_file_and_command_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("api-key: of-the-file\n")
    monkeypatch.setenv("UBATCH_API_KEY", "of-the-environment")
    assert resolved("--config serve.yaml")["api_key"] == "of-the-environment"
    assert not list(notes(resolved("--config serve.yaml"))), "nobody else sees it there"
    assert resolved("--config serve.yaml --api-key of-the-line")["api_key"] == "of-the-line"


def test_model_may_come_from_the_file(file: Path) -> None:
    file.write_text(f"model: {TINY}\n")
    command = read_serve_command("ubatch serve", "", ["--config", "serve.yaml"])
    assert command.engine.model == Path(TINY)
    assert command.settings["served_model_name"] == TINY


def test_example_file_serves_both_commands() -> None:
    config = UBatchConfig.from_yaml(EXAMPLE)
    assert to_engine_options(resolved(f"EP --enable-dbo --config {EXAMPLE}")).dbo == config
    assert not to_engine_options(resolved(f"--config {EXAMPLE}")).dbo.enable_dbo


@pytest.mark.parametrize("words", ["--enable-dbo --enable-two-batch-overlap", "--enable-two-batch-overlap"])
def test_two_names_with_one_value_are_no_contradiction(words: str) -> None:
    assert resolved(f"EP {words}")["enable_dbo"] is True


# -- what follows from what --------------------------------------------------------------------------------------------

USUAL = (1, 2, 4, *range(8, 257, 8))
DERIVED: Mapping[str, dict[str, Any]] = {
    "": {
        **{"device": "cpu", "dtype": "float32", "overlap_schedule": False, "gpu_memory_utilization": None},
        **{"max_num_seqs": 256, "max_num_batched_tokens": 2048, "served_model_name": TINY},
        **{"cudagraph_mode": "none", "cudagraph_capture_sizes": None, "max_prefill_tokens_per_mixed_step": "off"},
        **dict.fromkeys(Speculation.model_fields),
    },
    "GPUS=1": {
        **{"device": "cuda", "dtype": "bfloat16", "overlap_schedule": True, "gpu_memory_utilization": 0.9},
        **{"cudagraph_mode": "auto", "cudagraph_capture_sizes": USUAL, "max_cudagraph_capture_size": 256},
    },
    "GPUS=1 --kv-cache-memory 1G": {"gpu_memory_utilization": None},
    "GPUS=1 --device cpu --dtype bfloat16": {"overlap_schedule": False},
    "GPUS=1 NGRAM": {"overlap_schedule": False, "speculative_ngram_max": 4},
    "--max-num-batched-tokens 100": {"max_num_seqs": 100},
    "--max-num-seqs 4000": {"max_num_batched_tokens": 4000},
    "--no-enable-chunked-prefill": {"max_num_batched_tokens": 2048, "max_model_len": 1024},
    "--no-enable-chunked-prefill --max-model-len 4096 --allow-long-max-model-len": {"max_num_batched_tokens": 4096},
    "GPUS=1 --enforce-eager": {"cudagraph_mode": "none", "cudagraph_capture_sizes": None},
    "EAGLE --speculative-eagle-topk 2": {"speculative_num_draft_tokens": 8, "speculative_accept": "match"},
}


@pytest.mark.parametrize("call", DERIVED)
def test_what_follows_from_the_rest(call: str) -> None:
    settings = resolved(call)
    assert {name: settings[name] for name in DERIVED[call]} == DERIVED[call]
    assert not any(settings.given(name) for name in DERIVED[call])


def test_what_differs_between_machines_is_said_and_the_rest_is_a_default() -> None:
    settings = resolved("")
    assert {name for name, setting in settings.all.items() if setting.source is Source.DERIVED} == {
        *("device", "dtype", "kv_cache_memory", "max_model_len", "served_model_name", "overlap_schedule"),
        "cudagraph_mode",
    }


def eagle(*numbers: int, **more: Any) -> SpeculationConfig:
    return SpeculationConfig(Algorithm.EAGLE, *numbers, draft_model_path=HEAD, **more)


ENGINE: Mapping[str, dict[str, Any]] = {
    "": {"speculation": None, "scheduler.max_prefill_tokens_per_mixed_step": None, "dbo.comm_sms": None},
    "EP --emulated-link 10 1000": {"emulated_link": (10.0, 1000.0)},
    "EP --enable-dbo --ubatch-size 3 --dbo-decode-token-threshold 6": {
        **{"dbo.enable_dbo": True, "dbo.num_ubatches": 3, "dbo.dbo_decode_token_threshold": 6},
        "dbo.profile_ranges": False,
    },
    "--scheduling-policy lpm": {"scheduler.policy": SchedulingPolicy.LPM, "scheduler.max_model_len": 1024},
    "MIXED 64": {"scheduler.max_prefill_tokens_per_mixed_step": 64},
    "MIXED auto": {"scheduler.max_prefill_tokens_per_mixed_step": "auto"},
    "EP --enable-dbo --profile-ranges": {"dbo.profile_ranges": True},
    # graphs
    "GPUS=1 --cudagraph-mode none": {"cudagraph_mode": "none", "cudagraph_capture_sizes": None},
    "GPUS=1 --cudagraph-mode full --max-num-seqs 9": {
        **{"cudagraph_mode": "full", "cudagraph_capture_sizes": (1, 2, 4, 8, 9)}
    },
    "GPUS=1 --max-cudagraph-capture-size 20": {"cudagraph_capture_sizes": (1, 2, 4, 8, 16, 20)},
    "GPUS=1 --cudagraph-capture-sizes 7 3 7": {"cudagraph_capture_sizes": (7, 3, 7)},
    "GPUS=2 TP": {"cudagraph_mode": "auto", "cudagraph_capture_sizes": USUAL},
    "GPUS=2 TP --cudagraph-mode full --cudagraph-capture-sizes 2": {"cudagraph_capture_sizes": (2,)},
    # drafts
    "NGRAM": {"speculation": SpeculationConfig(Algorithm.NGRAM, 4), "overlaps_schedule": False},
    "NGRAM --speculative-num-draft-tokens 3": {"speculation": SpeculationConfig(Algorithm.NGRAM, 3)},
    "NGRAM --speculative-ngram-min 6": {"speculation": SpeculationConfig(Algorithm.NGRAM, 4, ngram_max=6, ngram_min=6)},
    "EAGLE": {"speculation": eagle(3, 3), "overlaps_schedule": False},
    "EAGLE --speculative-num-steps 5": {"speculation": eagle(5, 5)},
    "EAGLE --speculative-num-draft-tokens 2": {"speculation": eagle(2, 2)},
    "EAGLE --speculative-eagle-topk 2": {"speculation": eagle(8, 3, 2)},
    "EAGLE --speculative-eagle-topk 4 --speculative-num-steps 1": {"speculation": eagle(4, 1, 4)},
    "EAGLE --speculative-accept rejection": {"speculation": eagle(3, 3, acceptance=Acceptance.REJECTION)},
    "--speculative-algorithm draft_model --speculative-draft-model-path TINY": {
        "speculation": SpeculationConfig(Algorithm.DRAFT_MODEL, 3, 3, draft_model_path=TINY_MOE)
    },
}


@pytest.mark.parametrize("call", ENGINE)
def test_what_the_engine_gets(call: str) -> None:
    options = to_engine_options(resolved(call))
    assert {name: attrgetter(name)(options) for name in ENGINE[call]} == ENGINE[call]


def test_keywords_make_the_same_engine() -> None:
    keywords = {"data_parallel_size": 2, "enable_expert_parallel": True, "emulated_link": (10, 1000.0), "device": "cpu"}
    line = resolved("EP --emulated-link 10 1000 --device cpu --max-engine-restarts 0")
    assert to_engine_options(resolve_keywords(TINY, keywords)) == to_engine_options(line)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("512M", 512 * 2**20), ("512MiB", 512 * 2**20), ("1.5G", 3 * 2**29), ("512m", 512_000_000)),
        *(("7", 7), (7, 7)),
        *((text, None) for text in ("", "M", "0", "1 G B", "-1", "1e9", 0)),
    ],
)
def test_bytes(text: str | int, expected: int | None) -> None:
    if expected is not None:
        assert parse_bytes(text) == expected
        return
    with pytest.raises(ValueError, match="expected"):
        parse_bytes(text)


# -- which schedule runs in which mode ---------------------------------------------------------------------------------

DECODE, PREFILL, VERIFY = ForwardMode.DECODE, ForwardMode.PREFILL, ForwardMode.TARGET_VERIFY
SINGLE, SHARED = ("single_batch", 1, 2), "mlp_shared_overlap"
SCHEDULED: Mapping[str, list[tuple[str, int, int]]] = {
    "EP --config serve.yaml": [("mine", 4, 2), (SHARED, 2, 1), (SHARED, 3, 1)],
    "EP --config serve.yaml --schedule-decode two_batch_decode --schedule-verify mine": [
        *(("two_batch_decode", 3, 1), (SHARED, 2, 1), ("mine", 4, 2))
    ],
    "EP --enable-dbo --schedule two_batch_prefill --schedule-decode serial": [
        *(("serial", 1, 1), ("two_batch_prefill", 2, 1), ("two_batch_prefill", 2, 1))
    ],
    "EP SBO --dbo-decode-token-threshold 1": [SINGLE] * 3,
    "EP SBO --schedule-prefill serial": [SINGLE] * 3,
    "EP SBO --schedule single_batch_signalled": [("single_batch_signalled", 1, 1)] * 3,
    "EP SBO --enable-two-batch-overlap --schedule-decode two_batch_decode": [
        *(("two_batch_decode_2_chunks", 2, 2), (f"{SHARED}_2_chunks", 2, 2), (f"{SHARED}_2_chunks", 2, 2))
    ],
    "EP SBO --config serve.yaml --schedule mine": [("mine", 4, 2), ("mine", 2, 2), ("mine", 4, 2)],
}
"""Name, lanes and chunks of decode, prefill and verify steps; one's own schedule stays as it is written."""


@pytest.mark.parametrize("call", SCHEDULED)
def test_which_schedule_is_in_force(call: str, file: Path) -> None:
    file.write_text(OVERLAP_FILE)
    config = to_engine_options(resolved(call)).dbo
    schedules = [config.for_mode(mode).schedule for mode in (DECODE, PREFILL, VERIFY)]
    assert [(each.name, each.lanes, each.chunks) for each in schedules] == SCHEDULED[call]
    assert config.enable_dbo
    if "serve.yaml" in call:
        assert config.for_mode(DECODE).token_threshold == 64, "the rest of the mode's settings stay"
    if "threshold 1" in call:
        assert config.for_mode(DECODE).token_threshold == 1
    if "two_batch_decode_2_chunks" in schedules[0].name:
        assert schedules[0] == replace(SCHEDULES["two_batch_decode"], name="two_batch_decode_2_chunks", chunks=2)
        assert not {schedule.name for schedule in SCHEDULES.values()} & {each.name for each in schedules}


def test_the_file_gives_the_same_schedules_to_a_wrapped_module(file: Path) -> None:
    file.write_text(OVERLAP_FILE)
    ours, wrapped = to_engine_options(resolved("EP --config serve.yaml")).dbo, UBatchConfig.from_yaml(file)
    for mode in (DECODE, PREFILL, VERIFY):
        assert ours.for_mode(mode) == wrapped.for_mode(mode)


def test_comm_sms_and_profile_ranges_reach_the_runtime(file: Path) -> None:
    config = to_engine_options(resolved("GPUS=2 EP --enable-dbo --comm-sms 24")).dbo
    assert {config.for_mode(mode).schedule.comm_sms for mode in (DECODE, PREFILL, VERIFY)} == {24}
    file.write_text("enable-dbo: true\ncomm-sms: 0\nprofile-ranges: true\nmoe-backend: reference\n")
    options = to_engine_options(resolved("EP --config serve.yaml"))
    assert (options.dbo.comm_sms, options.dbo.profile_ranges, options.moe_backend) == (0, True, "reference")
    file.write_text("comm-sms: 0\nprofile-ranges: true\n")
    assert UBatchConfig.from_yaml(file).profile_ranges


# -- what is shown -----------------------------------------------------------------------------------------------------


def rows_printed(capsys: pytest.CaptureFixture[str], call: str) -> dict[str, tuple[str, str]]:
    """Setting -> its value and where it came from, as `--print-config` shows them."""
    assert main(["serve", TINY, *words_of(call)[0], "--print-config"]) == 0
    rows = (line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    return {name: tuple(map(str.strip, told.rsplit("  # ", 1))) for name, told in rows}  # type: ignore[misc]


def test_print_config_says_where_each_value_came_from(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_printed(capsys, f"EP --enable-dbo -tp 1 --config {EXAMPLE} --port=1234")
    assert rows["port"] == ("1234", "command line")
    assert rows["tensor-parallel-size"] == ("1", "command line")
    assert rows["dbo-decode-token-threshold"] == ("4", str(EXAMPLE))
    assert rows["block-size"][1] == "default"
    assert rows["dtype"][1] == "derived: these are tests"
    file.write_text(f"speculative-algorithm: eagle\nspeculative-draft-model-path: {HEAD}\nspeculative-eagle-topk: 2\n")
    rows = rows_printed(capsys, "--config serve.yaml --speculative-num-steps 4")
    assert rows["speculative-draft-model-path"][0] == json.dumps(str(HEAD))
    assert rows["speculative-num-steps"] == ("4", "command line")
    assert rows["speculative-eagle-topk"] == ("2", "serve.yaml")
    assert rows["speculative-num-draft-tokens"] == ("8", "derived: of a tree")
    rows = rows_printed(capsys, "EP SBO --device cpu")
    assert rows["schedule"] == ('"single_batch"', "derived: --enable-single-batch-overlap")


@pytest.mark.parametrize(
    "call",
    [
        "EP --enable-dbo --emulated-link 5 100 --kv-cache-memory 8M",
        "EP SBO",
        "EP SBO --config serve.yaml --schedule-verify serial",
        "EAGLE --speculative-eagle-topk 2",
        "GPUS=2 BACKEND deepep_auto --all2all-options max-tokens-per-rank=64 use_fp8=true",
    ],
)
def test_what_is_printed_can_be_read_again(call: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(OVERLAP_FILE)
    monkeypatch.setenv("UBATCH_API_KEY", "hush")
    settings = resolved(call)
    text = describe_settings(settings)
    assert "hush" not in text
    Path("again.yaml").write_text(text)
    again = resolve_settings(read_file(Path("again.yaml")), gpus=words_of(call)[1])
    values = [{n: s.value for n, s in each.all.items() if n != "api_key"} for each in (settings, again)]
    assert values[0] == values[1]
    assert to_engine_options(again) == to_engine_options(settings)
    assert measured_kinds(again) == measured_kinds(settings)  # thresholds in a file would be obeyed
    assert measured_kinds(settings) == MODE_KEYS or "--enable-dbo" not in call


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "max_num_seqs": st.sampled_from([4, 30, 256]),
        "cudagraph_mode": st.sampled_from(["auto", "none", "full"]),
        "cudagraph_capture_sizes": st.lists(st.integers(1, 40), min_size=1, max_size=3),
        "max_cudagraph_capture_size": st.integers(1, 40),
        "enforce_eager": st.booleans(),
    },
)


@pytest.mark.long
@given(OPTIONS)
def test_what_is_printed_is_what_is_in_force(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]) -> None:
    """Settings are refused, or their printed form is a file that gives the same engine."""
    try:
        settings = resolve_settings(read_keywords({"model": TINY, **options}), gpus=1)
    except ConfigError:
        return
    printed = tmp_path_factory.mktemp("printed") / "serve.yaml"
    printed.write_text(describe_settings(settings))
    if options.get("enforce_eager"):  # with it the mode is none, and a file that says both is taken, too
        assert settings["cudagraph_mode"] == "none"
    assert to_engine_options(resolve_settings(read_file(printed), gpus=1)) == to_engine_options(settings)


def test_help_has_every_group_and_not_what_only_a_file_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for group in SERVE.groups:
        assert f"{group} options" in text
    for flag in ("--dbo-decode-token-threshold INT", "--no-enable-prefix-caching", "--kv-cache-memory BYTES"):
        assert flag in text
    for flag in ("--schedule-decode STR", "--schedule-prefill STR", "--schedule-verify STR"):
        assert flag in text
    assert not any(f"{key} " in text for key in ("--decode", "--schedules", "--prefill ", "--verify"))
    assert "{None}" not in text.replace("{None,ngram,", "")


NOTES: Mapping[str, list[str]] = {
    "": [],
    "EP --enable-dbo": [],
    "EP SBO": [],
    "--enable-dbo": ["no communication to hide"],
    "SBO": ["--enable-single-batch-overlap has no communication to hide"],
    "--ubatch-size 3": ["--ubatch-size without --enable-dbo: no step overlaps"],
    "EP SBO --ubatch-size 3": ["--ubatch-size without --enable-dbo: one batch is not split"],
    "EP --schedule-decode serial": ["--schedule-decode without --enable-dbo: no step overlaps"],
    "--profile-ranges": ["--profile-ranges without --enable-dbo: no step overlaps"],
    "EP --enable-dbo --schedule serial": ["overlaps nothing"],
    "--enforce-eager": ["--enforce-eager on a CPU"],
    "--api-key hidden-key": ["UBATCH_API_KEY"],
    "--num-state-snapshots 9 --no-enable-prefix-caching": [
        "--num-state-snapshots has no effect: no layer of this model has linear attention",
        "--num-state-snapshots without --enable-prefix-caching: nothing is kept",
    ],
}


@pytest.mark.parametrize("call", NOTES)
def test_notes_say_what_may_not_have_been_meant(call: str) -> None:
    told = list(notes(resolved(call)))
    assert len(told) == len(NOTES[call])
    for line, expected in zip(told, NOTES[call], strict=True):
        assert expected in line
        assert "hidden-key" not in line


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "hush\n", " hush", "hush\t", "\u00a0hush", "hu\x1fsh", "hu\nsh", "hu\udcffsh"])
def test_a_key_that_no_client_can_send_is_refused_and_not_shown(
    key: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = [["--api-key", key], *([["--config", "serve.yaml"]] if key.isascii() else [])]
    file.write_text(f"api-key: {json.dumps(key)}\n")
    for words in (*ways, []):
        if not words:
            monkeypatch.setenv("UBATCH_API_KEY", key)
        assert main(["serve", TINY, *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert any(why in line for why in ("white space", "printable characters", "nicode", "at least 1 character"))
        assert "hu" not in line.replace("should", "")
    assert line.startswith("ubatch serve: UBATCH_API_KEY: ")
    assert resolve_keywords(TINY, {"device": "cpu"})["api_key"] is None, "no server, no key"


@pytest.mark.parametrize("wrong", ["api-key: 12345", "api-key: 12345-a\napi_key: 12345-b"])
def test_a_key_that_is_no_text_is_not_shown(wrong: str, file: Path) -> None:
    file.write_text(wrong)
    with pytest.raises(ConfigError, match="api-key") as raised:
        resolved("--config serve.yaml")
    assert "12345" not in str(raised.value)
