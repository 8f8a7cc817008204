"""What the families' configs can say: logits of a prefill against transformers, for every branch a config opens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LATENT, load_reference, make_checkpoint, reference_logits
from model_checks import PROMPTS, admitted, all_logits, check_prefill, close
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model_runner import ModelRunner, ScheduledRequest
from model_runner.models import DecoderLM
from ubatch import ConfigError

LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
KIMI_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 32.0, "original_max_position_embeddings": 8},
    **{"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}
BF16 = {"max_shard_size": "30KB", "dtype": torch.bfloat16}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "head_dim": None}),
        ("Llama", {"rope_parameters": LINEAR, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
        ("Llama", {"rope_parameters": {**YARN, "attention_factor": 0.7}, "num_key_value_heads": 1, **BF16}),
        ("Qwen2", {"rope_parameters": YARN, "num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0, **BF16}),
        ("Qwen2Moe", {"qkv_bias": False, "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": []}),
        ("Qwen2Moe", {"shared_expert_intermediate_size": 7, "num_key_value_heads": 4, **BF16}),
        ("Qwen3", {"attention_bias": True, "rope_parameters": YARN, "rms_norm_eps": 1e-3}),
        ("Qwen2Moe", {"use_sliding_window": True, "sliding_window": 5}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0, **BF16}),
        ("Qwen3Next", {"mlp_only_layers": [1], "layer_types": None, "full_attention_interval": 3}),
        ("Qwen3Next", {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 2, "num_key_value_heads": 1, **BF16}),
        ("Qwen3_5Moe", {"linear_num_value_heads": 6, "attention_bias": True, "tie_word_embeddings": True, **BF16}),
        ("Mistral", {"sliding_window": 5, "tie_word_embeddings": True, **BF16}),
        ("Olmoe", {"clip_qkv": 0.5, "num_key_value_heads": 4, "norm_topk_prob": True, **BF16}),
        ("GptOss", {"attention_bias": False, "layer_types": ["full_attention"] * 3, "num_key_value_heads": 4, **BF16}),
        ("Glm4Moe", {"use_qk_norm": False, "attention_bias": False, "first_k_dense_replace": 3, **BF16}),
        ("GraniteMoe", {"attention_bias": True, "tie_word_embeddings": True, **BF16}),
        ("GraniteMoeShared", {"num_key_value_heads": 1, "rope_parameters": YARN, **BF16}),
        ("Mixtral", {"sliding_window": 5, "num_experts_per_tok": 1, "head_dim": None}),
        ("Mixtral", {"rope_parameters": None, "tie_word_embeddings": True, **BF16}),
        ("DeepseekV2", {"topk_method": "greedy", "n_group": None, "topk_group": None, "q_lora_rank": None}),
        ("DeepseekV2", {"attention_bias": True, "rope_parameters": PLAIN, "n_shared_experts": 1, **BF16}),
        ("DeepseekV2", {"q_lora_rank": None, "attention_bias": True, "first_k_dense_replace": 0, "rms_norm_eps": 1e-2}),
        ("DeepseekV3", {"norm_topk_prob": False, "rope_interleave": False, "attention_bias": True}),
        ("DeepseekV3", {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 3, "rope_parameters": PLAIN}),
        ("DeepseekV3", {"n_routed_experts": 16, "topk_group": 1, "q_lora_rank": None, **BF16}),
        ("DeepseekV3", {"rope_parameters": {**LATENT["rope_parameters"], "mscale_all_dim": 0.0}}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_prefill_logits(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    check_prefill(make_checkpoint(tmp_path, family, **overrides))


def test_a_model_in_bf16_stays_near_its_reference(tmp_path: Path) -> None:
    """Compute in bf16, of a checkpoint in bf16: near the fp32 model, and the gate is not rounded."""
    path = make_checkpoint(tmp_path, "DeepseekV3", dtype=torch.bfloat16)
    with ModelRunner(path, num_kv_blocks=64, dtype=torch.bfloat16) as runner:
        mlp: Any = runner.model.get_submodule("layers.1.mlp")
        assert (mlp.gate_dtype, mlp.correction_bias.dtype) == (torch.float32, torch.float32)
        assert mlp.kernel.experts.dtype == torch.bfloat16
        assert runner.kv_cache.spec.dtype == torch.bfloat16
        requests = admitted(runner, PROMPTS)
        got = all_logits(runner, [ScheduledRequest(request, request.num_tokens) for request in requests])
    reference = load_reference(path)
    wanted = torch.cat([reference_logits(reference, prompt) for prompt in PROMPTS])
    error = (got.float() - wanted).abs()
    assert error.median() < 0.02 * wanted.abs().max()  # a token that bf16 sends to another expert may be far off


def test_experts_in_one_tensor_are_those_stored_one_by_one(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "Qwen3_5Moe")
    weights = load_file(path / "model.safetensors")
    by_layer: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name in sorted(weights, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        layer, experts, rest = name.partition(".experts.")
        if experts:
            by_layer.setdefault(layer, {}).setdefault(rest.split(".")[1], []).append(weights[name])
    assert by_layer
    stacked = {name: w for name, w in weights.items() if ".experts." not in name}
    for layer, kinds in by_layer.items():
        gate, up, down = (torch.stack(kinds[kind]) for kind in ("gate_proj", "up_proj", "down_proj"))
        stacked |= {f"{layer}.experts.gate_up_proj": torch.cat((gate, up), dim=1), f"{layer}.experts.down_proj": down}
    reference = load_reference(path)
    wanted = torch.cat([reference_logits(reference, prompt) for prompt in PROMPTS])
    save_file(stacked, path / "model.safetensors")
    with ModelRunner(path, num_kv_blocks=64) as runner:
        requests = admitted(runner, PROMPTS)
        close(all_logits(runner, [ScheduledRequest(request, request.num_tokens) for request in requests]), wanted)


def test_gpt_oss_runs_on_experts_that_have_biases(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "GptOss")
    with ModelRunner(path, num_kv_blocks=8) as runner:
        assert runner.experts_backend == "grouped"
    with pytest.raises(ConfigError, match="experts back end 'native' has no biases"):
        ModelRunner(path, num_kv_blocks=8, experts_backend="native")


def test_kimi_k2_is_deepseek_v3(tmp_path: Path) -> None:
    """Its config names a model type of its own, and code that is not run; the architecture is DeepSeek-V3's."""
    overrides = {"n_routed_experts": 12, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    theirs = make_checkpoint(tmp_path / "deepseek", "DeepseekV3", rope_parameters=KIMI_ROPE, **overrides)
    path = shutil.copytree(theirs, tmp_path / "kimi")
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {
        "model_type": "kimi_k2",
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": {"type": rope.pop("rope_type"), **rope},
    }
    (path / "config.json").write_text(json.dumps(config))
    with ModelRunner(path, num_kv_blocks=64) as runner:
        requests = admitted(runner, PROMPTS)
        got = all_logits(runner, [ScheduledRequest(request, request.num_tokens) for request in requests])
    reference = load_reference(theirs)
    close(got, torch.cat([reference_logits(reference, prompt) for prompt in PROMPTS]))


def test_deepseek_keeps_one_latent_per_token(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "DeepseekV2")
    with ModelRunner(path, num_kv_blocks=8) as runner:
        assert runner.kv_cache.spec.numbers_per_token == LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("Mixtral", "model.layers.0.block_sparse_moe.experts.7.w3.weight"),
        ("GraniteMoe", "model.layers.0.block_sparse_moe.input_linear.weight"),
    ],
)
def test_checkpoints_have_the_published_names(tmp_path: Path, family: str, name: str) -> None:
    """What the oracle wrote is what the hub has: otherwise this package would read its own dialect only."""
    path = make_checkpoint(tmp_path, family)
    with safe_open(path / "model.safetensors", framework="pt") as file:
        assert name in set(file.keys())


@pytest.mark.parametrize("own", [True, False])
def test_tied_embeddings_and_an_output_layer_in_the_checkpoint(own: bool, tmp_path: Path) -> None:
    """transformers ties them only if they are equal; fine-tuned checkpoints may have both, and say they are tied."""
    path = make_checkpoint(tmp_path, "Qwen2", tie_word_embeddings=True)
    tensors = load_file(path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = torch.randn_like(embedding) if own else embedding.clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    check_prefill(path)
    with ModelRunner(path, num_kv_blocks=1) as runner:
        assert isinstance(runner.model, DecoderLM)
        assert (runner.model.lm_head is runner.model.embed_tokens) is not own
