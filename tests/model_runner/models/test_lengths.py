"""How long a sequence may be: what configs say of it, and logits beyond the length that a model was trained for."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES, make_checkpoint
from model_checks import admitted, all_logits, close, expected_logits

from model_runner import CheckpointError, ModelRunner, ScheduledRequest, model_class
from model_runner.decoder.rope import read_longest_context
from model_runner.models import DecoderConfig
from model_runner.weights.hf_config import HFConfig
from serving.cli import main
from ubatch import ConfigError

YARN = {"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("positions", "rope", "longest"),
    [
        (40_960, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),  # Qwen3
        (163_840, {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163_840),  # DeepSeek-V3
        (131_072, {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}, 131_072),  # Kimi-K2
        (8192, {"type": "yarn", "original_max_position_embeddings": 4096}, 8192),  # its factor is the quotient
        (8192, {"type": "yarn", "factor": 4.0}, 8192),  # of what, it does not say
        (4096, {"type": "linear", "factor": 2.5, "original_max_position_embeddings": 4096}, 10_240),
        (16_384, {"type": "linear", "factor": 4.0}, 16_384),  # deepseek-coder: multiplied already
        (
            131_072,
            {
                **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                "original_max_position_embeddings": 8192,
            },
            131_072,  # Llama 3.1
        ),
        (4096, None, 4096),
    ],
)
def test_what_configs_say(positions: int, rope: dict[str, Any] | None, longest: int) -> None:
    values = {"max_position_embeddings": positions, "rope_scaling": rope}
    assert read_longest_context(HFConfig(values, Path("config.json"))) == longest
    if rope and "original_max_position_embeddings" in rope:  # it may stand beside the scaling
        values["original_max_position_embeddings"] = rope.pop("original_max_position_embeddings")
        assert read_longest_context(HFConfig(values, Path("config.json"))) == longest


def check(path: Path, length: int, **settings: Any) -> None:
    prompt = [(7 * place) % 131 for place in range(length)]
    with ModelRunner(path, num_kv_blocks=64, block_size=8, **settings) as runner:
        assert runner.max_model_len == length + 1
        (request,) = admitted(runner, [prompt], length + 1)
        got = all_logits(runner, [ScheduledRequest(request, length)])
    close(got, expected_logits(path, [prompt]))


@pytest.mark.parametrize("family", ["Qwen3", "DeepseekV3"])
def test_a_recipe_for_longer_contexts(family: str, tmp_path: Path) -> None:
    """Positions behind `max_position_embeddings`, as far as the scaling reaches; with latent attention, too."""
    check(make_checkpoint(tmp_path, family, max_position_embeddings=40, rope_parameters=YARN), 127)


@pytest.mark.parametrize("family", ["Llama", "DeepseekV2"])
def test_longer_than_the_model_if_allowed(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = {"rope_type": "default", "rope_theta": 50_000.0}
    path = make_checkpoint(tmp_path, family, max_position_embeddings=64, rope_parameters=plain)
    with pytest.raises(ConfigError, match=r"1 to the model's 64 positions, not 101\. With allow_long"):
        ModelRunner(path, num_kv_blocks=64, max_model_len=101)
    check(path, 100, max_model_len=101, allow_long_max_model_len=True)
    assert "max_model_len is 101, but the model has 64 positions" in caplog.text


def test_dual_chunk_attention_is_refused_beyond_its_original_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen2.5-1M: up to the original length attention is plain."""
    chunked = {"chunk_size": 64, "local_size": 16, "original_max_position_embeddings": 96}
    path = make_checkpoint(tmp_path, "Qwen2", dual_chunk_attention_config=chunked)
    for options in ({}, {"max_model_len": 97}, {"max_model_len": 300, "allow_long_max_model_len": True}):
        with pytest.raises(ConfigError, match=r"beyond 96 tokens \(dual_chunk.*Lower it to 96 at most"):
            ModelRunner(path, num_kv_blocks=4, **options)  # type: ignore[arg-type]
    with ModelRunner(path, num_kv_blocks=4, max_model_len=96) as runner:
        assert runner.max_model_len == 96
    command = ["serve", str(path), "--print-config", "--max-model-len"]
    assert main([*command, "97"]) == 2
    assert "--max-model-len is 97, but beyond 96 tokens" in capsys.readouterr().err
    assert main(command[:-1]) == 2, "the checkpoint's own length is longer"
    assert "--max-model-len is 256, but beyond 96 tokens" in capsys.readouterr().err
    main([*command, "96"])
    assert "has no tokenizer" in capsys.readouterr().err, "which is checked last"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "has no 'original_max_position_embeddings'"),
        ({"original_max_position_embeddings": "long"}, "original_max_position_embeddings is 'long'"),
        ([], r"dual_chunk_attention_config is \[\].*or null"),
        (None, None),
    ],
)
def test_a_dual_chunk_attention_config_without_its_original_length(entries: object, message: str | None) -> None:
    values = HFConfig({**FAMILIES["Qwen2"], "dual_chunk_attention_config": entries}, Path("config.json"))
    with pytest.raises(CheckpointError, match=message) if message else nullcontext():
        config = model_class("Qwen2ForCausalLM").read_config(values, HFConfig({}, Path()))
        assert isinstance(config, DecoderConfig)
        assert config.full_attention_length is None
