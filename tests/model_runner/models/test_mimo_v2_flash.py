"""MiMo-V2-Flash beyond the random configs: entries as published, and kinds of layers that differ in ways that
transformers cannot build. Its own model is then changed to the same."""

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_reference, make_checkpoint, read_config, with_config, with_tensors
from model_checks import close, expected_logits, prefill_logits
from safetensors.torch import load_file, save_file
from torch import nn

from attention import AttentionShape, LayersKVCache
from model_runner import CheckpointError, ModelRunner, check_tensor_parallel
from model_runner.auto.cpu_dtype import _Sizes
from model_runner.drafting.network import load_draft
from ubatch import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"


read = partial(read_config, "MiMoV2Flash")


def as_published(fields: dict[str, Any]) -> dict[str, Any]:
    """The same config in the entries of the published checkpoint."""
    full, sliding = (fields["rope_parameters"][kind] for kind in (FULL, SLIDING))
    return {
        **dict.fromkeys(("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps", "sliding_window"), ...),
        "hybrid_layer_pattern": [int(kind == SLIDING) for kind in fields["layer_types"]],
        "moe_layer_freq": [int(kind == "sparse") for kind in fields["mlp_layer_types"]],
        "rope_theta": full["rope_theta"],
        "swa_rope_theta": sliding["rope_theta"],
        "partial_rotary_factor": full["partial_rotary_factor"],
        "rope_scaling": {"type": "default", "rope_type": "default"},
        "hybrid_block_size": 2,
        "layernorm_epsilon": fields["rms_norm_eps"],
        "sliding_window": fields["sliding_window"],
        "sliding_window_size": fields["sliding_window"] - 1,
        "attention_chunk_size": fields["sliding_window"] - 1,
        "swa_num_attention_heads": fields["num_attention_heads"],
        "swa_num_key_value_heads": 2 * fields["num_key_value_heads"],
        "swa_head_dim": fields["head_dim"],
        "swa_v_head_dim": fields["v_head_dim"],
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_shared_experts": None,
        "routed_scaling_factor": None,
    }


def test_published_entries_say_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rope = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in ((FULL, 9e4), (SLIDING, 700.0))}
    for each in rope.values():
        each["partial_rotary_factor"] = 0.5
    path = make_checkpoint(
        tmp_path,
        "MiMoV2Flash",
        rope_parameters=rope,
        rms_norm_eps=1e-3,
        routed_scaling_factor=1.0,
        layer_types=[SLIDING, FULL, SLIDING],
        mlp_layer_types=["sparse", "dense", "sparse"],
    )
    wanted = expected_logits(path)
    published = as_published(json.loads((path / "config.json").read_text()))
    with_tensors(path, {"model.mtp.layers.0.eh_proj.weight": torch.zeros(48, 96)}, **published)
    with caplog.at_level(logging.INFO, logger="model_runner"):
        close(prefill_logits(path), wanted)
    assert "1 (layers for multi-token prediction, which are not served)" in caplog.text
    # A config of transformers that kept the published entries has both.
    with_config(path, layer_types=[SLIDING, FULL, SLIDING], num_nextn_predict_layers=3)
    with ModelRunner(path, num_kv_blocks=4) as runner, pytest.raises(ConfigError, match="attention of several kinds"):
        load_draft("mtp", None, runner)
    with_config(path, layer_types=[SLIDING, FULL, FULL])
    with pytest.raises(CheckpointError, match=r"hybrid_layer_pattern is \[1, 0, 1\].*as layer_types"):
        prefill_logits(path)


@pytest.mark.parametrize(("in_full", "in_sliding"), [(True, True), (True, False), (False, False)])
def test_either_kind_of_layer_may_have_sinks(in_full: bool, in_sliding: bool, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "MiMoV2Flash", layer_types=[SLIDING, FULL, SLIDING])
    reference: Any = load_reference(path)
    weights = load_file(path / "model.safetensors")
    for layer, block in enumerate(reference.model.layers):
        attention, name = block.self_attn, f"model.layers.{layer}.self_attn.attention_sink_bias"
        if not (in_full if layer == 1 else in_sliding):
            attention.sinks = None
            weights.pop(name, None)
        elif layer == 1:
            weights[name] = torch.tensor([0.5, -1.0, 1.5, 0.1])
            attention.sinks = nn.Parameter(weights[name])
    save_file(weights, path / "model.safetensors")
    with_config(path, add_full_attention_sink_bias=in_full, add_swa_attention_sink_bias=in_sliding)
    close(prefill_logits(path), expected_logits(reference))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_windows_may_have_any_number_of_key_value_heads(kv_heads: int, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "MiMoV2Flash", layer_types=[SLIDING, FULL, SLIDING])
    reference: Any = load_reference(path)
    weights = load_file(path / "model.safetensors")
    for layer in (0, 2):
        attention = reference.model.layers[layer].self_attn
        attention.num_key_value_groups = 4 // kv_heads
        for part, dim in (("k_proj", 16), ("v_proj", 10)):
            name = f"model.layers.{layer}.self_attn.{part}.weight"
            weights[name] = weights[name][: kv_heads * dim].clone()
            getattr(attention, part).weight = nn.Parameter(weights[name])
    save_file(weights, path / "model.safetensors")
    with_config(path, swa_num_key_value_heads=kv_heads)
    close(prefill_logits(path), expected_logits(reference))


def test_the_cache_holds_what_each_kind_of_layer_needs(tmp_path: Path) -> None:
    with ModelRunner(make_checkpoint(tmp_path, "MiMoV2Flash"), kv_cache_memory=1 << 20, block_size=4) as runner:
        cache = runner.kv_cache
        assert isinstance(cache, LayersKVCache)
        full, sliding = 2 * (16 + 10), 4 * (16 + 10)
        assert cache.spec.bytes_per_block == 4 * (full + 2 * sliding) * torch.float32.itemsize
        assert cache.num_blocks == (1 << 20) // cache.spec.bytes_per_block


def test_the_values_factor_is_in_the_output_projection(tmp_path: Path) -> None:
    """Also if that stays in fp8: then in its scales, which are not rounded."""
    path = make_checkpoint(tmp_path, "MiMoV2Flash")
    stored = load_file(path / "model.safetensors")["model.layers.1.self_attn.o_proj.weight"]
    with ModelRunner(path, num_kv_blocks=4, experts_backend="grouped") as runner:
        attention: Any = runner.model.get_submodule("layers.1.attention")
        assert torch.equal(attention.out.weight, stored * 0.6)
        attention.out.scales = torch.full((2, 1), 2.0)
        attention._scale_values(0.25)
        assert torch.equal(attention.out.scales, torch.full((2, 1), 0.5))
        assert torch.equal(attention.out.weight, stored * 0.6)


def test_what_a_config_leaves_out() -> None:
    left_out = ("n_group", "topk_group", "rope_parameters", "sliding_window", "attention_value_scale")
    config = read(head_dim=12, **dict.fromkeys(left_out, ...))
    full, sliding = (config.attention.of_layer(layer) for layer in (0, 1))
    assert (full.sliding_window, sliding.sliding_window) == (None, 129)
    assert (full.num_kv_heads, sliding.num_kv_heads) == (2, 4)
    assert (full.sinks, sliding.sinks) == (False, True)
    assert [rope.theta for rope in config.layer_ropes] == [5e6, 1e4, 1e4]
    assert {rope.partial_rotary_factor for rope in config.layer_ropes} == {0.334}
    assert config.value_scale == 0.707
    assert read(attention_value_scale=None).value_scale == 1.0
    kinds = [config.attention.of_layer(layer).sliding_window is None for layer in range(3)]
    assert (kinds, config.moe.layers) == ([True, False, False], {1, 2})
    assert [read(num_hidden_layers=12).attention.of_layer(layer).sinks for layer in (0, 5, 6, 11)] == [0, 0, 1, 0]
    assert read(sliding_window=40, sliding_window_size=8).attention.of_layer(1).sliding_window == 9
    assert read(layer_types=[FULL] * 3).attention == AttentionShape(4, 2, 16, v_head_dim=10)


def test_every_kind_of_layer_must_fit_the_ranks() -> None:
    three = read(num_attention_heads=12, num_key_value_heads=1, swa_num_key_value_heads=3, intermediate_size=36)
    check_tensor_parallel(three, 3)
    with pytest.raises(ConfigError, match="its 3 key/value heads, nor they it"):
        check_tensor_parallel(three, 2)
    assert _Sizes.of(read()).projections[0] == (48, 4 * 16 + 2 * (16 + 10)), "of the first layer"
