"""Settings of `ubatch serve`: which source counts, what is refused, and what is shown of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repository import ROOT

from serving.cli import main
from serving.engine.speculation import Algorithm, SpeculationConfig
from serving.options import (
    Settings,
    Source,
    describe_settings,
    notes,
    read_serve_command,
    resolve_keywords,
    resolve_settings,
    to_engine_options,
)
from serving.options.flags.fields import parse_bytes
from serving.options.overlap import measured_kinds
from serving.options.sources import merge, read_file, read_keywords
from serving.scheduler import SchedulingPolicy
from ubatch import UBatchConfig
from ubatch.schedules.modes import MODE_KEYS

TINY = str(ROOT / "examples" / "models" / "tiny-moe")
EXAMPLE = ROOT / "examples" / "dbo.yaml"
EP = ("--data-parallel-size", "2", "--enable-expert-parallel")


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UBATCH_API_KEY", raising=False)


def resolve(*words: str) -> Settings:
    return read_serve_command("ubatch serve", "", [TINY, *words]).settings


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that the command prints."""
    assert main(["serve", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    line = captured.err.strip()
    assert line.startswith("ubatch serve: ")
    assert "\n" not in line
    return line.removeprefix("ubatch serve: ")


# -- which source counts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "in_file", "words", "default", "from_file", "from_line"),
    [
        ("port", "port: 9000", ["--port", "9001"], 8000, 9000, 9001),
        ("port", "port: 9000", ["--port=9001"], 8000, 9000, 9001),
        ("port", "port: 9000", ["--port", "8000"], 8000, 9000, 8000),  # the default, but asked for
        ("max_num_seqs", "max_num_seqs: 8", ["--max_num_seqs", "9"], None, 8, 9),
        ("enable_prefix_caching", "enable-prefix-caching: false", ["--enable-prefix-caching"], True, False, True),
        ("enable_dbo", "enable-dbo: true", ["--no-enable-dbo"], False, True, False),
        ("enable_dbo", "enable-two-batch-overlap: true", ["--no-enable-dbo"], False, True, False),
        ("enable_dbo", "enable_dbo: true", ["--no-enable-two-batch-overlap"], False, True, False),
        ("ubatch_size", "num-ubatches: 3", ["--ubatch-size", "4"], 2, 3, 4),
        ("overlap_schedule", "overlap-schedule: true", ["--no-overlap-schedule"], False, True, False),
        ("kv_cache_memory", "kv-cache-memory: 1M", ["--kv-cache-memory", "2M"], None, 2**20, 2**21),
        ("max_waiting_requests", "max-waiting-requests: 5", ["--max-waiting-requests", "None"], None, 5, None),
        ("max_request_bytes", "max-request-bytes: 1M", ["--max-request-bytes", "2M"], 2**23, 2**20, 2**21),
        ("max_outputs_per_request", "max-outputs-per-request: 5", ["--max-outputs-per-request", "6"], 1024, 5, 6),
        ("scheduling_policy", "scheduling-policy: lpm", ["--scheduling-policy", "priority"], "fcfs", "lpm", "priority"),
        ("timeout_s", "timeout-s: 5", ["--timeout-s", "6.5"], 60.0, 5.0, 6.5),
        ("profile_dir", "profile-dir: a/b", ["--profile-dir", "c"], None, Path("a/b"), Path("c")),
    ],
)
def test_command_line_beats_file_beats_default(
    tmp_path: Path, name: str, in_file: str, words: list[str], default: Any, from_file: Any, from_line: Any
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(in_file + "\n")
    config = ("--config", str(file))
    filed, both = resolve(*config), resolve(*words, *config)
    assert (merge()[name] or False) == (default or False)
    assert (filed[name], filed.all[name].source) == (from_file, Source.FILE)
    assert (both[name], both.all[name].source) == (from_line, Source.COMMAND_LINE)


def test_environment_stands_between_file_and_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("api-key: of-the-file\n")
    monkeypatch.setenv("UBATCH_API_KEY", "of-the-environment")
    assert resolve("--config", str(file))["api_key"] == "of-the-environment"
    assert resolve("--config", str(file), "--api-key", "of-the-line")["api_key"] == "of-the-line"
    monkeypatch.delenv("UBATCH_API_KEY")
    assert resolve("--config", str(file))["api_key"] == "of-the-file"


def test_model_may_come_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: {TINY}\n")
    command = read_serve_command("ubatch serve", "", ["--config", str(file)])
    assert command.engine.model == Path(TINY)
    assert command.settings["served_model_name"] == TINY


@pytest.mark.parametrize(
    ("names", "value"),
    [(("a",), "a"), (("a", "b"), ("a", "b")), (("b", "a", "b"), ("b", "a")), (("a", "a"), "a")],
)
def test_a_model_may_have_several_names(tmp_path: Path, names: tuple[str, ...], value: object) -> None:
    """The flag is given once for each; a file has a list. Before, the last one won."""
    words = [word for name in names for word in ("--served-model-name", name)]
    assert resolve(*words)["served_model_name"] == value
    file = tmp_path / "serve.yaml"
    file.write_text(f"served-model-name: [{', '.join(names)}]\n")
    assert resolve("--config", str(file))["served_model_name"] == value


VALUES = st.dictionaries(st.sampled_from(["port", "block_size", "max_num_seqs", "timeout_s"]), st.integers(1, 99))


@given(st.lists(VALUES, max_size=4))
def test_every_layer_overrides_exactly_what_it_names(layers: list[dict[str, int]]) -> None:
    settings = merge(*map(read_keywords, layers))
    defaults = merge()
    for name in ("port", "block_size", "max_num_seqs", "timeout_s"):
        naming = [layer[name] for layer in layers if name in layer]
        assert settings[name] == (naming[-1] if naming else defaults[name])
        assert settings.given(name) == bool(naming)


def test_example_file_serves_both_commands() -> None:
    config = UBatchConfig.from_yaml(EXAMPLE)
    dbo = read_serve_command("ubatch serve", "", [TINY, *EP, "--enable-dbo", "--config", str(EXAMPLE)]).engine.dbo
    assert dbo == config
    assert not read_serve_command("ubatch serve", "", [TINY, "--config", str(EXAMPLE)]).engine.dbo.enable_dbo


# -- what is derived ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "machine", "expected"),
    [
        (
            {},
            {"gpus": 0},
            {"device": "cpu", "dtype": "float32", "overlap_schedule": False, "gpu_memory_utilization": None},
        ),
        ({}, {"gpus": 1}, {"device": "cuda", "dtype": "bfloat16", "overlap_schedule": True}),
        ({}, {"gpus": 1}, {"gpu_memory_utilization": 0.9}),
        ({"kv_cache_memory": "1G"}, {"gpus": 1}, {"gpu_memory_utilization": None, "kv_cache_memory": 2**30}),
        ({"device": "cpu", "dtype": "bfloat16"}, {"gpus": 1}, {"dtype": "bfloat16", "overlap_schedule": False}),
        ({"speculative_algorithm": "ngram"}, {"gpus": 1}, {"overlap_schedule": False, "speculative_ngram_max": 4}),
        ({"max_num_batched_tokens": 100}, {"gpus": 0}, {"max_num_seqs": 100}),
        ({"max_num_seqs": 4000}, {"gpus": 0}, {"max_num_batched_tokens": 4000}),
        ({"enable_chunked_prefill": False}, {"gpus": 0}, {"max_num_batched_tokens": 2048, "max_model_len": 1024}),
        ({}, {"gpus": 0}, {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "served_model_name": TINY}),
    ],
)
def test_what_follows_from_the_rest(
    keywords: dict[str, Any], machine: dict[str, int], expected: dict[str, Any]
) -> None:
    settings = resolve_settings(read_keywords({"model": TINY, **keywords}), **machine)
    assert {name: settings[name] for name in expected} == expected
    for name in set(expected) - set(keywords):
        assert not settings.given(name)


def test_keywords_make_engine_options() -> None:
    options = to_engine_options(
        resolve_keywords(
            TINY,
            {
                "data_parallel_size": 2,
                "enable_expert_parallel": True,
                "emulated_link": (10, 1000.0),
                "enable_dbo": True,
                "ubatch_size": 3,
                "dbo_decode_token_threshold": 6,
                "scheduling_policy": "lpm",
                "speculative_algorithm": "ngram",
                "speculative_num_draft_tokens": 3,
                "device": "cpu",
            },
        )
    )
    assert options.emulated_link == (10.0, 1000.0)
    assert (options.dbo.enable_dbo, options.dbo.num_ubatches, options.dbo.dbo_decode_token_threshold) == (True, 3, 6)
    assert options.scheduler.policy is SchedulingPolicy.LPM
    assert options.scheduler.max_model_len == 1024
    assert options.speculation == SpeculationConfig(Algorithm.NGRAM, 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512M", 512 * 2**20), ("512MiB", 512 * 2**20), ("1.5G", 3 * 2**29), ("512m", 512_000_000), ("7", 7), (7, 7)],
)
def test_bytes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "M", "0", "1 G B", "-1", "1e9", 0])
def test_no_bytes(text: str | int) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_bytes(text)


def test_every_value_has_a_distinct_derivation() -> None:
    """What differs between machines is said; what does not is a default."""
    settings = resolve_settings(read_keywords({"model": TINY}), gpus=0)
    derived = {name for name, setting in settings.all.items() if setting.source is Source.DERIVED}
    assert derived == {
        "device",
        "dtype",
        "kv_cache_memory",
        "max_model_len",
        "served_model_name",
        "overlap_schedule",
        "cudagraph_mode",
    }


# -- what is shown -----------------------------------------------------------------------------------------------


def test_print_config_says_where_each_value_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", TINY, *EP, "--enable-dbo", "--config", str(EXAMPLE), "--port=1234", "--print-config"]
    assert main(words) == 0
    rows = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["port"].split(" # ") == [rows["port"].split(" # ")[0], "command line"]
    assert rows["port"].startswith("1234 ")
    assert rows["dbo-decode-token-threshold"].startswith("4 ")
    assert rows["dbo-decode-token-threshold"].endswith(f"# {EXAMPLE}")
    assert rows["block-size"].endswith("# default")
    assert rows["dtype"].endswith("# derived: these are tests")


def test_what_is_printed_can_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UBATCH_API_KEY", "hush")
    settings = resolve(*EP, "--enable-dbo", "--emulated-link", "5", "100", "--kv-cache-memory", "8M")
    text = describe_settings(settings)
    assert "hush" not in text
    file = tmp_path / "again.yaml"
    file.write_text(text)
    again = resolve_settings(read_file(file), gpus=0)
    assert {n: s.value for n, s in again.all.items() if n != "api_key"} == {
        n: s.value for n, s in settings.all.items() if n != "api_key"
    }
    assert measured_kinds(again) == measured_kinds(settings) == MODE_KEYS  # thresholds in a file would be obeyed


def test_help_has_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for group in ("model", "parallelism", "overlap", "cache", "scheduling", "attention", "server", "speculation"):
        assert f"{group} options" in text
    for flag in ("--dbo-decode-token-threshold INT", "--no-enable-prefix-caching", "--kv-cache-memory BYTES"):
        assert flag in text
    assert "{None}" not in text.replace("{None,ngram,", "")


def test_notes_say_what_may_not_have_been_meant() -> None:
    assert list(notes(resolve())) == []
    assert "no communication to hide" in " ".join(notes(resolve("--enable-dbo")))
    assert list(notes(resolve(*EP, "--enable-dbo"))) == []
    assert "--ubatch-size" in " ".join(notes(resolve("--ubatch-size", "3")))
    assert "overlaps nothing" in " ".join(notes(resolve(*EP, "--enable-dbo", "--schedule", "serial")))
    told = list(notes(resolve("--num-state-snapshots", "9", "--no-enable-prefix-caching")))
    assert told == [
        "--num-state-snapshots has no effect: no layer of this model has linear attention",
        "--num-state-snapshots without --enable-prefix-caching: nothing is kept",
    ]


# -- what is refused ---------------------------------------------------------------------------------------------


def test_what_the_checkpoint_has_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "MODEL is missing" in refused(capsys)
    assert "is not a folder" in refused(capsys, str(tmp_path / "nothing"))
    assert "config.json" in refused(capsys, str(tmp_path))
    dense = tmp_path / "dense"
    dense.mkdir()
    config = json.loads((Path(TINY) / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    (dense / "model.safetensors").symlink_to(Path(TINY) / "model.safetensors")
    assert "is a dense model" in refused(capsys, str(dense), *EP)


def test_an_empty_key_in_the_environment_is_no_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UBATCH_API_KEY", "")
    assert "UBATCH_API_KEY: it should have at least 1 character" in refused(capsys, TINY)
    assert resolve_keywords(TINY, {"device": "cpu"})["api_key"] is None, "no server, no key"


@pytest.mark.parametrize("key", ["hush\n", " hush", "hush\t", "\u00a0hush", "hu\x1fsh", "hu\nsh", "hu\udcffsh"])
def test_a_key_that_no_client_can_send_is_refused_and_not_shown(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    told = [refused(capsys, TINY, "--api-key", key)]
    if key.isascii():
        file.write_text(f"api-key: {json.dumps(key)}\n")
        told.append(refused(capsys, TINY, "--config", str(file)))
    monkeypatch.setenv("UBATCH_API_KEY", key)
    told.append(refused(capsys, TINY))
    for line in told:
        assert any(why in line for why in ("white space", "printable characters", "nicode"))
        assert "hu" not in line.replace("should", "")
    assert resolve_keywords(TINY, {"device": "cpu"})["api_key"] is None


@pytest.mark.parametrize("words", [("--enable-dbo", "--enable-two-batch-overlap"), ("--enable-two-batch-overlap",)])
def test_two_names_with_one_value_are_no_contradiction(words: tuple[str, ...]) -> None:
    assert resolve(*EP, *words)["enable_dbo"] is True
