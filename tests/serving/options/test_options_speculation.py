"""The settings of speculation: what follows from what, and every contradiction in one line that names both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from repository import MODELS

from attention import UBatchAttention
from model_runner import ModelRunner
from model_runner.speculation import Acceptance
from serving.cli import main
from serving.engine.options import EngineOptions
from serving.engine.rank.build import make_core
from serving.engine.speculation import Algorithm, SpeculationConfig, runner_options
from serving.generate import read as read_generate
from serving.options import (
    resolve_keywords,
    resolve_settings,
    to_engine_options,
)
from serving.options.flags.server_flags import Speculation
from serving.options.sources import read_file, read_keywords
from ubatch import ConfigError

TINY, HEAD = str(MODELS / "tiny-moe"), str(MODELS / "tiny-moe-eagle")
EAGLE = ("--speculative-algorithm", "eagle", "--speculative-draft-model-path", HEAD)


@pytest.mark.parametrize(
    ("keywords", "wanted"),
    [
        ({"algorithm": "ngram"}, SpeculationConfig(Algorithm.NGRAM, 4)),
        ({"algorithm": "ngram", "ngram_min": 6}, SpeculationConfig(Algorithm.NGRAM, 4, ngram_max=6, ngram_min=6)),
        ({}, SpeculationConfig(Algorithm.EAGLE, 3, 3, draft_model_path=Path(HEAD))),
        ({"num_steps": 5}, SpeculationConfig(Algorithm.EAGLE, 5, 5, draft_model_path=Path(HEAD))),
        ({"num_draft_tokens": 2}, SpeculationConfig(Algorithm.EAGLE, 2, 2, draft_model_path=Path(HEAD))),
        ({"eagle_topk": 2}, SpeculationConfig(Algorithm.EAGLE, 8, 3, 2, Path(HEAD))),
        ({"eagle_topk": 4, "num_steps": 1}, SpeculationConfig(Algorithm.EAGLE, 4, 1, 4, Path(HEAD))),
        (
            {"accept": "rejection"},
            SpeculationConfig(Algorithm.EAGLE, 3, 3, draft_model_path=Path(HEAD), acceptance=Acceptance.REJECTION),
        ),
        (
            {"algorithm": "draft_model", "draft_model_path": TINY},
            SpeculationConfig(Algorithm.DRAFT_MODEL, 3, 3, draft_model_path=Path(TINY)),
        ),
    ],
)
def test_what_follows_from_the_rest(keywords: dict[str, Any], wanted: SpeculationConfig) -> None:
    given = {"algorithm": "eagle", **keywords}
    if given["algorithm"] == "eagle":
        given["draft_model_path"] = HEAD
    settings = resolve_keywords(TINY, {f"speculative_{name}": value for name, value in given.items()})
    assert to_engine_options(settings).speculation == wanted
    assert not to_engine_options(settings).overlaps_schedule


def test_nothing_is_guessed_unless_it_is_asked_for() -> None:
    settings = resolve_keywords(TINY, {})
    assert to_engine_options(settings).speculation is None
    assert {name: settings[name] for name in Speculation.model_fields} == dict.fromkeys(Speculation.model_fields)


def test_print_config_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"speculative-algorithm: eagle\nspeculative-draft-model-path: {HEAD}\nspeculative-eagle-topk: 2\n")
    assert main(["serve", TINY, "--config", str(file), "--speculative-num-steps", "4", "--print-config"]) == 0
    rows = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["speculative-draft-model-path"].split()[0] == json.dumps(HEAD)
    assert rows["speculative-num-steps"].endswith("# command line")
    assert rows["speculative-eagle-topk"].endswith(f"# {file}")
    assert rows["speculative-num-draft-tokens"].split() == ["8", "#", "derived:", "of", "a", "tree"]
    assert rows["speculative-accept"].startswith('"match"')
    settings = resolve_settings(read_file(file), read_keywords({"model": TINY}), gpus=0)
    assert to_engine_options(settings).speculation == SpeculationConfig(Algorithm.EAGLE, 8, 3, 2, Path(HEAD))


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "steps alone": (
        ("--speculative-num-steps", "3"),
        "--speculative-num-steps needs --speculative-algorithm; without it nothing is guessed.",
    ),
    "no such algorithm": (("--speculative-algorithm", "eagel"), "'eagel'"),
    "no path": (
        ("--speculative-algorithm", "eagle"),
        "--speculative-algorithm eagle needs --speculative-draft-model-path, the folder of the head's checkpoint.",
    ),
    "no path to a model": (("--speculative-algorithm", "draft_model"), "the folder of the small model's checkpoint"),
    "a path to n-grams": (
        ("--speculative-algorithm", "ngram", *EAGLE[2:]),
        "--speculative-draft-model-path has no effect with --speculative-algorithm ngram",
    ),
    "a path to mtp": (
        ("--speculative-algorithm", "mtp", *EAGLE[2:]),
        "--speculative-draft-model-path has no effect with --speculative-algorithm mtp",
    ),
    "no layer in the model": (
        ("--speculative-algorithm", "mtp"),
        f"--speculative-algorithm mtp: {TINY} has no layer for multi-token prediction",
    ),
    "n-grams of a head": (
        (*EAGLE, "--speculative-ngram-max", "3"),
        "--speculative-ngram-max has no effect with --speculative-algorithm eagle",
    ),
    "a tree of n-grams": (
        ("--speculative-algorithm", "ngram", "--speculative-eagle-topk", "2"),
        "--speculative-eagle-topk has no effect with --speculative-algorithm ngram",
    ),
    "chain": (
        (*EAGLE, "--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4"),
        "--speculative-num-draft-tokens is 4, but --speculative-num-steps 3: with --speculative-eagle-topk 1",
    ),
    "tree by rejection": (
        (*EAGLE, "--speculative-eagle-topk", "2", "--speculative-accept", "rejection"),
        "--speculative-accept rejection needs chains of drafts, but with --speculative-eagle-topk 2 they are trees",
    ),
    "tree too small": (
        (
            *EAGLE,
            "--speculative-eagle-topk",
            "2",
            "--speculative-num-steps",
            "1",
            "--speculative-num-draft-tokens",
            "3",
        ),
        "--speculative-num-draft-tokens is 3; a tree of 1 steps and --speculative-eagle-topk 2 has 2 drafts at most",
    ),
    "nothing": ((*EAGLE, "--speculative-num-steps", "0"), "--speculative-num-steps 0: it should be at least 1"),
    "no checkpoint": ((*EAGLE[:3], "nowhere"), "--speculative-draft-model-path: "),
}


@pytest.mark.parametrize("command", ["serve", "generate"])
@pytest.mark.parametrize("name", WRONG)
def test_contradictions_are_one_clear_line(name: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = WRONG[name]
    prompt = ("--prompt", "x") if command == "generate" else ()
    assert main([command, TINY, *prompt, *words]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("algorithm", "change", "message"),
    [
        ("eagle", {"hidden_size": 96}, r"hidden_size of .* is 96, the model's is 192: the head does not fit"),
        ("draft_model", {"vocab_size": 99}, r"vocab_size of .* is 99, the model's is 2048: the two must share a token"),
    ],
)
def test_draft_networks_that_do_not_fit(algorithm: str, change: dict[str, int], message: str, tmp_path: Path) -> None:
    source = Path(HEAD if algorithm == "eagle" else TINY)
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    keywords = {"speculative_algorithm": algorithm, "speculative_draft_model_path": tmp_path}
    with pytest.raises(ConfigError, match=message):
        resolve_keywords(TINY, keywords)
    flags = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(tmp_path)]
    with pytest.raises(ConfigError, match=message):
        read_generate("ubatch generate", "", [TINY, "--prompt", "x", *flags])


def test_attention_without_tree_masks_refuses_trees_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    speculation = SpeculationConfig(Algorithm.EAGLE, 4, 2, 2, Path(HEAD))
    monkeypatch.setattr(UBatchAttention, "takes_trees", False)
    with pytest.raises(ConfigError, match=r"'\w+' has no tree masks, so drafts cannot be trees \(topk 2\)"):
        ModelRunner(TINY, kv_cache_memory=1 << 20, **runner_options(speculation))


def test_a_runner_that_was_made_for_no_draft_network_is_refused() -> None:
    options = EngineOptions(Path(TINY), speculation=SpeculationConfig(Algorithm.EAGLE, 2, 2, 1, Path(HEAD)))
    with (
        ModelRunner(TINY, kv_cache_memory=1 << 20) as runner,
        pytest.raises(ConfigError, match="without a draft network"),
    ):
        make_core(options, runner)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens: it should be at least 1"),
        ({"ngram_max": 1, "ngram_min": 2}, r"ngram_max is 1, below speculative_ngram_min \(2\)"),
        ({"eagle_topk": 2}, "no effect with speculative_algorithm ngram"),
        ({"draft_model_path": Path(HEAD)}, "no effect with speculative_algorithm ngram"),
        ({"algorithm": "eagle"}, "needs --speculative-draft-model-path"),
    ],
)
def test_configs_that_cannot_work(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_keywords(
            TINY, {f"speculative_{name}": value for name, value in ({"algorithm": "ngram"} | wrong).items()}
        )
