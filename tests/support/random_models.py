"""Random configs of model families: what the entries of a config open, in any combination that transformers can run."""

from __future__ import annotations

import random
from typing import Any

from checkpoints import COMMON


def random_fields(family: str, seed: int) -> dict[str, Any]:
    """All fields of a random config of a family. Heads and experts can be shared by two ranks."""
    rng = random.Random(f"{family} {seed}")
    kv_heads = rng.choice([1, 2, 4])
    heads = kv_heads * rng.choice([2, 4] if kv_heads == 1 else [1, 2])
    head_dim = rng.choice([8, 12, 20])
    hidden_size = heads * head_dim if family == "Olmoe" else rng.choice([24, 40, 72])
    fields: dict[str, Any] = {
        **COMMON,
        "hidden_size": hidden_size,
        "intermediate_size": 4 * rng.randrange(4, 15),
        "num_hidden_layers": rng.choice([2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": rng.choice([1e-6, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.3,
        "rope_parameters": _rope(rng),
        "initializer_range": 0.2,
    }
    return {**fields, **_OF_FAMILY[family](rng, fields)}


def _rope(rng: random.Random) -> dict[str, Any]:
    theta = rng.choice([10_000.0, 250_000.0])
    scaled = {"rope_theta": theta, "factor": rng.choice([2.0, 4.0]), "original_max_position_embeddings": 64}
    return rng.choice(
        [
            {"rope_type": "default", "rope_theta": theta},
            {"rope_type": "linear", "rope_theta": theta, "factor": 2.5},
            {"rope_type": "yarn", **scaled},
            {"rope_type": "llama3", **scaled, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        ]
    )


def _experts(rng: random.Random, name: str) -> dict[str, Any]:
    return {name: rng.choice([4, 8]), "num_experts_per_tok": rng.choice([1, 3])}


def _llama(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}


def _qwen3(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {**_qwen2(rng, fields), "attention_bias": rng.random() < 0.5}


def _qwen3_moe(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        **_experts(rng, "num_experts"),
        "attention_bias": rng.random() < 0.5,
        "moe_intermediate_size": 4 * rng.randrange(2, 10),
        "norm_topk_prob": rng.random() < 0.5,
        "mlp_only_layers": rng.choice([[], [0], [1]]),
    }


def _mixtral(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {**_experts(rng, "num_local_experts"), **_mistral(rng, fields)}


def _qwen2(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    slides = rng.random() < 0.4
    return {
        "use_sliding_window": slides,
        "sliding_window": rng.randrange(3, 12),
        "max_window_layers": rng.choice([0, 1]),
    }


def _qwen2_moe(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        **_experts(rng, "num_experts"),
        "moe_intermediate_size": 4 * rng.randrange(2, 10),
        "shared_expert_intermediate_size": rng.randrange(5, 40),
        "qkv_bias": rng.random() < 0.7,
        "norm_topk_prob": rng.random() < 0.5,
        "mlp_only_layers": rng.choice([[], [0], [1]]),
        **_qwen2(rng, fields),
    }


def _hybrid(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    layers, heads = fields["num_hidden_layers"], rng.choice([2, 4])
    full = {rng.randrange(layers)}
    share = rng.choice([0.25, 0.5, 1.0] if fields["head_dim"] % 8 == 0 else [0.5, 1.0])
    return {
        **_experts(rng, "num_experts"),
        "attention_bias": rng.random() < 0.3,
        "moe_intermediate_size": 4 * rng.randrange(2, 10),
        "shared_expert_intermediate_size": rng.randrange(5, 40),
        "layer_types": [("linear_attention", "full_attention")[layer in full] for layer in range(layers)],
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * rng.choice([1, 2, 3]),
        "linear_key_head_dim": rng.choice([4, 8, 12]),
        "linear_value_head_dim": rng.choice([4, 6, 12]),
        "linear_conv_kernel_dim": rng.choice([2, 3, 4]),
        "rope_parameters": {**fields["rope_parameters"], "partial_rotary_factor": share},
    }


def _qwen3_next(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        **_hybrid(rng, fields),
        "norm_topk_prob": rng.random() < 0.5,
        "mlp_only_layers": rng.choice([[], [0], [1]]),
    }


def _mistral(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": rng.choice([None, rng.randrange(2, 6), rng.randrange(2, 20)])}


def _olmoe(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        **_experts(rng, "num_experts"),
        "attention_bias": rng.random() < 0.3,
        "norm_topk_prob": rng.random() < 0.5,
        "clip_qkv": rng.choice([None, 0.7]),
    }


def _granite(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        **_llama(rng, fields),
        "embedding_multiplier": rng.choice([1.0, 4.0, 12.0]),
        "residual_multiplier": rng.choice([0.22, 0.5, 1.0, 1.7]),
        "attention_multiplier": rng.choice([0.05, 0.3, 1.0]),
        "logits_scaling": rng.choice([0.7, 1.0, 3.0]),
    }


def _granite_moe(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {**_granite(rng, fields), **_experts(rng, "num_local_experts"), "mlp_bias": False}


def _granite_moe_shared(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {**_granite_moe(rng, fields), "shared_intermediate_size": rng.choice([0, rng.randrange(5, 40)])}


def _gpt_oss(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"]
    return {
        **_experts(rng, "num_local_experts"),
        "attention_bias": rng.random() < 0.7,
        "sliding_window": rng.randrange(2, 12),
        "layer_types": rng.choice([None, [rng.choice(kinds) for _ in range(fields["num_hidden_layers"])]]),
        "swiglu_limit": rng.choice([0.5, 1.0, 7.0]),
        "swiglu_alpha": rng.choice([1.702, 1.0]),
    }


def _grouped_experts(rng: random.Random) -> dict[str, Any]:
    groups, top_groups = rng.choice([(1, 1), (2, 1), (2, 2), (4, 2)])
    return {
        "n_routed_experts": 8,
        "num_experts_per_tok": rng.choice([1, 3]),
        "n_shared_experts": rng.choice([1, 2]),
        "n_group": groups,
        "topk_group": top_groups,
        "moe_intermediate_size": 4 * rng.randrange(2, 10),
        "first_k_dense_replace": rng.choice([0, 1]),
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "norm_topk_prob": rng.random() < 0.7,
    }


def _glm4_moe(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    share = rng.choice([0.25, 0.5, 0.5, 1.0] if fields["head_dim"] % 8 == 0 else [0.5, 0.5, 1.0])
    return {
        **_grouped_experts(rng),
        "attention_bias": rng.random() < 0.5,
        "use_qk_norm": rng.random() < 0.5,
        "rope_parameters": {**fields["rope_parameters"], "partial_rotary_factor": share},
    }


def _mimo_v2_flash(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    layers, kv_heads = fields["num_hidden_layers"], rng.choice([1, 2])
    kinds = ["full_attention", "sliding_attention"]
    sparse = _grouped_experts(rng)
    del sparse["n_shared_experts"], sparse["first_k_dense_replace"]
    return {
        **sparse,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": 2 * kv_heads * rng.choice([1, 2]),
        "v_head_dim": rng.choice([4, 6, fields["head_dim"], 24]),
        "attention_bias": rng.random() < 0.3,
        "attention_value_scale": rng.choice([None, 0.707, 1.5]),
        "sliding_window": rng.choice([rng.randrange(2, 6), rng.randrange(6, 20)]),
        "layer_types": rng.choice([None, None, *([kind] * layers for kind in kinds), rng.choices(kinds, k=layers)]),
        "mlp_layer_types": rng.choice([None, rng.choices(["dense", "sparse"], k=layers)]),
        "rope_parameters": {
            kind: {
                "rope_type": "default",
                "rope_theta": rng.choice([500.0, 10_000.0, 5_000_000.0]),
                "partial_rotary_factor": rng.choice([0.334, 0.5, 1.0]),
            }
            for kind in kinds
        },
    }


def _deepseek_v2(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    method = rng.choice(["greedy", "group_limited_greedy"])
    return {**_deepseek(rng, fields), "topk_method": method, "norm_topk_prob": False}


def _deepseek(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    nope, rotated = rng.choice([8, 12]), rng.choice([4, 8])
    return {
        **_grouped_experts(rng),
        "num_key_value_heads": fields["num_attention_heads"],
        "head_dim": rotated,
        "q_lora_rank": rng.choice([None, 20]),
        "kv_lora_rank": rng.choice([16, 24]),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rotated,
        "v_head_dim": rng.choice([6, 10]),
        "attention_bias": rng.random() < 0.3,
    }


_OF_FAMILY = {
    "Llama": _llama,
    "Mixtral": _mixtral,
    "Qwen3": _qwen3,
    "Qwen3Moe": _qwen3_moe,
    "DeepseekV2": _deepseek_v2,
    "Qwen2": _qwen2,
    "Qwen2Moe": _qwen2_moe,
    "Mistral": _mistral,
    "Olmoe": _olmoe,
    "Glm4Moe": _glm4_moe,
    "GptOss": _gpt_oss,
    "Granite": _granite,
    "GraniteMoe": _granite_moe,
    "GraniteMoeShared": _granite_moe_shared,
    "DeepseekV3": _deepseek,
    "MiMoV2Flash": _mimo_v2_flash,
    "Qwen3Next": _qwen3_next,
    "Qwen3_5Moe": _hybrid,
}
RANDOM_FAMILIES = tuple(_OF_FAMILY)
