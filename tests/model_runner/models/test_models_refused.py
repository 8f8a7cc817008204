"""Checkpoints that no family can run: refused by name, before any weight is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoints import read_config

from attention import MLAShape
from model_runner import CheckpointError, UnknownArchitecture, known_architectures, model_class
from model_runner.decoder.rope import YarnRope
from model_runner.models import DecoderConfig, Rope
from model_runner.weights.files import HFConfig
from moe import SigmoidTopKRouter
from ubatch import ConfigError


def windows_of(config: Any) -> tuple[int | None, ...]:
    """The window of every layer."""
    return tuple(config.attention.of_layer(layer).sliding_window for layer in range(config.num_layers))


def refused_configs() -> list[tuple[str, dict[str, Any], str]]:
    """Family, changes, and what the refusal says, of `refused_configs.yaml`."""
    text = Path(__file__).with_name("refused_configs.yaml").read_text(encoding="utf-8")
    return [
        (family, {name: ... if value == "..." else value for name, value in changes.items()}, message)
        for family, cases in yaml.safe_load(text).items()
        for case in cases
        for message, changes in case.items()
    ]


@pytest.mark.parametrize(("family", "changes", "message"), refused_configs())
def test_configs_that_cannot_be(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(family, **changes)


def test_what_configs_of_the_hub_say_beside() -> None:
    """Entries of published configs that transformers does not write."""
    published = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    assert read_config("DeepseekV3", **published) == read_config("DeepseekV3")
    every_second = read_config("DeepseekV3", num_hidden_layers=6, moe_layer_freq=2)
    assert every_second.moe.layers == {2, 4}
    kv_only = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}
    assert read_config("Llama", quantization_config=kv_only) == read_config("Llama")
    assert read_config("Qwen3", sliding_window=8) == read_config("Qwen3"), "a window that is switched off"
    assert read_config("Mixtral", num_key_value_heads=...).attention.num_kv_heads == 4


def test_windows_of_mistral() -> None:
    """7B v0.1 has one, later ones say null."""
    assert read_config("Mistral", sliding_window=7).attention.sliding_window == 7
    assert read_config("Mistral").attention.sliding_window is None
    assert read_config("Mistral", sliding_window=...).attention.sliding_window == 4096


def test_windows_of_qwen() -> None:
    """Switched on without a length, it is 4096; null is none."""
    on = {"use_sliding_window": True, "max_window_layers": 1}
    assert windows_of(read_config("Qwen2", **on, sliding_window=...)) == (None, 4096, 4096)
    assert read_config("Qwen2", **on, sliding_window=None) == read_config("Qwen2")
    assert windows_of(read_config("Qwen2Moe", **on, sliding_window=...)) == (4096, None, None)
    assert read_config("Qwen3Moe", **on, sliding_window=...).attention.sliding_window == 4096


def test_only_deepseek_v3_may_not_interleave() -> None:
    assert not read_config("DeepseekV3", rope_interleave=False).rope_interleaved
    assert read_config("DeepseekV2", rope_interleave=False).rope_interleaved


def test_swish_is_silu() -> None:
    assert read_config("Llama", hidden_act="swish") == read_config("Llama")


def test_what_families_assume_where_a_config_is_silent() -> None:
    silent = {"rope_parameters": ..., "rms_norm_eps": ...}
    assert read_config("Mixtral", **silent).rope == Rope(1_000_000.0)
    assert read_config("Mixtral", **silent).rms_norm_eps == 1e-5
    for family in ("Llama", "Qwen3", "Qwen3Moe", "DeepseekV2", "DeepseekV3"):
        assert read_config(family, **silent).rope == Rope(10_000.0)
        assert read_config(family, **silent).rms_norm_eps == 1e-6


def test_what_older_configs_do_not_say() -> None:
    """Which layers have a window, before `layer_types`; and the share of a head that GLM-4.5 rotates."""
    windows = {"use_sliding_window": True, "sliding_window": 8}
    for family in ("Qwen2", "Qwen3"):
        assert windows_of(read_config(family, **windows, max_window_layers=1)) == (None, 8, 8)
        assert windows_of(read_config(family, **windows)) == (None,) * 3, "the first 28 have none"
        assert read_config(family, **windows, max_window_layers=0).attention.sliding_window == 8
    assert windows_of(read_config("Qwen2Moe", **windows)) == (8, None, 8)
    assert windows_of(read_config("Qwen2Moe", **windows, max_window_layers=1)) == (8, None, None)
    assert windows_of(read_config("GptOss")) == (5, None, 5)
    assert read_config("Glm4Moe", rope_parameters={"rope_theta": 1e4}).rope == Rope(1e4, partial_rotary_factor=0.5)


def test_the_published_config_of_deepseek_v3() -> None:
    """Its names are older than transformers 5, and some are its own."""
    path = Path(__file__).with_name("deepseek_v3_config.json")
    values = HFConfig(json.loads(path.read_text(encoding="utf-8")), path)
    config = model_class("DeepseekV3ForCausalLM", values).read_config(values, HFConfig({}, Path()))
    assert isinstance(config, DecoderConfig)
    assert isinstance(config.rope, YarnRope)
    assert isinstance(config.attention, MLAShape)
    assert config.attention.softmax_scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)  # 0.1 ln 40 + 1
    assert config.moe is not None
    assert config.moe.layers == frozenset(range(3, 61))
    assert config.moe.router == SigmoidTopKRouter(8, num_groups=8, top_groups=4, scale=2.5)
    assert (config.num_experts, config.q_lora_rank, config.rope_interleaved) == (256, 1536, True)


def test_kinds_of_models_that_cannot_run() -> None:
    def kind_of(architecture: str, **values: Any) -> object:
        return model_class(architecture, HFConfig(values, Path("config.json")))

    with pytest.raises(ConfigError, match="T5ForConditionalGeneration is an encoder-decoder model"):
        kind_of("T5ForConditionalGeneration", is_encoder_decoder=True)
    hybrid = ["linear_attention", "full_attention"]
    with pytest.raises(ConfigError, match="JambaForCausalLM mixes 'linear_attention' layers"):
        kind_of("JambaForCausalLM", layer_types=hybrid)
    with pytest.raises(ConfigError, match="mixes 'linear_attention' layers"):
        kind_of("Qwen3_5ForConditionalGeneration", text_config={"layer_types": hybrid})
    with pytest.raises(ConfigError, match="GraniteMoeHybridForCausalLM mixes 'mamba' layers"):
        kind_of("GraniteMoeHybridForCausalLM", layer_types=["mamba", "attention"])
    chunked = ["chunked_attention", "full_attention"]
    with pytest.raises(ConfigError, match="Llama4ForConditionalGeneration has 'chunked_attention' layers") as caught:
        kind_of("Llama4ForConditionalGeneration", text_config={"layer_types": chunked})
    assert "hybrid" not in str(caught.value)
    for architecture in known_architectures():
        kind_of(architecture, layer_types=["full_attention", "sliding_attention"], is_encoder_decoder=False)


def test_unknown_architectures_get_the_list_of_known_ones() -> None:
    with pytest.raises(UnknownArchitecture, match="'GraniteMoeHybridForCausalLM'"):  # without Mamba layers
        model_class("GraniteMoeHybridForCausalLM", HFConfig({"layer_types": ["attention"]}, Path("config.json")))
    with pytest.raises(UnknownArchitecture) as caught:
        model_class("MinistralForCausalLM")
    assert caught.value.architecture == "MinistralForCausalLM"
    assert "did you mean" not in str(caught.value), "the weights of Mistral or Mixtral are others"
    assert all(architecture in str(caught.value) for architecture in known_architectures())
