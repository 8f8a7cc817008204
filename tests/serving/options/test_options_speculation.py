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
