"""Random configs of model families: what the entries of a config open, in any combination that transformers can run."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from checkpoints import COMMON, known_fields

_EITHER = (False, True)
_KINDS = ("full_attention", "sliding_attention")
CHOICES: Mapping[str, Sequence[Any]] = {
    "intermediate_size": range(16, 60, 4),
    "rms_norm_eps": (1e-6, 1e-3),
    "tie_word_embeddings": (False, False, True),
    "attention_bias": _EITHER,
    "mlp_bias": _EITHER,
    "qkv_bias": _EITHER,
    "use_qk_norm": _EITHER,
    "norm_topk_prob": _EITHER,
    "use_sliding_window": _EITHER,
    "sliding_window": (2, 5, 11),
    "max_window_layers": (0, 1),
    "num_experts": (4, 8),
    "num_local_experts": (4, 8),
    "num_experts_per_tok": (1, 3),
    "moe_intermediate_size": range(8, 40, 4),
    "shared_intermediate_size": (0, 7, 20),
    "shared_expert_intermediate_size": (5, 20, 33),
    "mlp_only_layers": ([], [0], [1]),
    "n_routed_experts": (8,),
    "n_shared_experts": (1, 2),
    "first_k_dense_replace": (0, 1),
    "routed_scaling_factor": (1.0, 2.5),
    "clip_qkv": (None, 0.7),
    "embedding_multiplier": (1.0, 4.0, 12.0),
    "residual_multiplier": (0.22, 0.5, 1.0, 1.7),
    "attention_multiplier": (0.05, 0.3, 1.0),
    "logits_scaling": (0.7, 1.0, 3.0),
    "swiglu_limit": (0.5, 1.0, 7.0),
    "swiglu_alpha": (1.702, 1.0),
    "attention_value_scale": (None, 0.707, 1.5),
    "q_lora_rank": (None, 20),
    "kv_lora_rank": (16, 24),
    "qk_nope_head_dim": (8, 12),
    "v_head_dim": (4, 6, 10, 24),
    "linear_key_head_dim": (4, 8, 12),
    "linear_value_head_dim": (4, 6, 12),
    "linear_conv_kernel_dim": (2, 3, 4),
}
"""What an entry may be, whichever family has it."""
_OF_FAMILY: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "Mistral": {"sliding_window": (None, 2, 5, 11)},
    "Mixtral": {"sliding_window": (None, 2, 5, 11)},
    "DeepseekV2": {"topk_method": ("greedy", "group_limited_greedy"), "norm_topk_prob": (False,), "mlp_bias": (False,)},
}
"""Other choices of a family."""


def random_fields(family: str, seed: int) -> dict[str, Any]:
    """All fields of a random config of a family. Heads and experts can be shared by two ranks."""
    rng = random.Random(f"{family} {seed}")
    choices = known_fields(family, CHOICES) | dict(_OF_FAMILY.get(family, {}))
    fields = dict(COMMON) | {name: rng.choice(values) for name, values in choices.items()} | _heads(rng, family)
    fields |= {"num_hidden_layers": rng.choice([2, 3]), "rope_parameters": _rope(rng), "initializer_range": 0.2}
    fields["n_group"], fields["topk_group"] = rng.choice([(1, 1), (2, 1), (2, 2), (4, 2)])
    if family in _PARTLY_ROTATED:
        shares = [0.25, 0.5, 1.0] if fields["head_dim"] % 8 == 0 else [0.5, 1.0]
        fields["rope_parameters"]["partial_rotary_factor"] = rng.choice(shares)
    layers = fields["num_hidden_layers"]
    if family == "GptOss":
        fields["layer_types"] = rng.choice([None, rng.choices(_KINDS, k=layers)])
    elif family == "MiMoV2Flash":
        fields |= _mimo(rng, layers)
    elif "linear_key_head_dim" in choices:
        heads, full = rng.choice([2, 4]), rng.randrange(layers)
        fields |= {"linear_num_key_heads": heads, "linear_num_value_heads": heads * rng.choice([1, 2, 3])}
        fields["layer_types"] = [_KINDS[0] if layer == full else "linear_attention" for layer in range(layers)]
    return known_fields(family, fields)


_PARTLY_ROTATED = ("Glm4Moe", "Qwen3Next", "Qwen3_5Moe")


def _heads(rng: random.Random, family: str) -> dict[str, Any]:
    kv_heads, head_dim = rng.choice([1, 2, 4]), rng.choice([8, 12, 20])
    heads = kv_heads * rng.choice([2, 4] if kv_heads == 1 else [1, 2])
    if family.startswith("Deepseek"):
        head_dim, kv_heads = rng.choice([4, 8]), heads
    if family == "MiMoV2Flash":
        kv_heads, heads = min(kv_heads, 2), 2 * min(kv_heads, 2) * rng.choice([1, 2])
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "qk_rope_head_dim": head_dim,
        "hidden_size": heads * head_dim if family == "Olmoe" else rng.choice([24, 40, 72]),
    }


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


def _mimo(rng: random.Random, layers: int) -> dict[str, Any]:
    """Kinds of layers, and rotary embeddings for each."""
    ropes = {
        kind: {
            "rope_type": "default",
            "rope_theta": rng.choice([500.0, 10_000.0, 5_000_000.0]),
            "partial_rotary_factor": rng.choice([0.334, 0.5, 1.0]),
        }
        for kind in _KINDS
    }
    return {
        "layer_types": rng.choice([None, None, *([kind] * layers for kind in _KINDS), rng.choices(_KINDS, k=layers)]),
        "mlp_layer_types": rng.choice([None, rng.choices(["dense", "sparse"], k=layers)]),
        "rope_parameters": ropes,
    }
