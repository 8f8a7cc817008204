"""Small checkpoints of every model family, written by transformers itself, and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # else imported where it is used: ranks that only run checkpoints start seconds earlier
    from transformers import PreTrainedModel

COMMON: Mapping[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # far from uniform logits, so that a wrong layer shows
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED: Mapping[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden / heads
    "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
}
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
    },
}
HYBRID: Mapping[str, Any] = {
    **{name: value for name, value in COMMON.items() if name != "intermediate_size"},
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": 0.25},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
GRANITE: Mapping[str, Any] = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,  # not head_dim ** -0.5
    "logits_scaling": 1.5,
}
ZERO_CENTRED = ("Qwen3Next", "Qwen3_5Moe")
"""Families whose norms multiply by 1 + weight, except those of linear attention."""
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Llama": {
        **COMMON,
        **GROUPED,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 50_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "Qwen2": {**COMMON, **GROUPED},
    "Qwen3": {**COMMON, **GROUPED},
    "Mistral": {**COMMON, **GROUPED, "sliding_window": None},
    "Mixtral": {**COMMON, **GROUPED, "num_local_experts": 8, "num_experts_per_tok": 3},
    "Qwen2Moe": {
        **COMMON,
        **GROUPED,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 36,
        "mlp_only_layers": [1],
    },
    "Qwen3Moe": {
        **COMMON,
        **GROUPED,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],  # two sparse layers around a dense one
        "norm_topk_prob": True,
    },
    "Olmoe": {**COMMON, **GROUPED, "head_dim": 12, "num_experts": 8, "num_experts_per_tok": 3},
    "GptOss": {
        **COMMON,
        **GROUPED,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 5,
        "swiglu_limit": 0.7,  # small, so that it clamps
    },
    "Glm4Moe": {
        **COMMON,
        **GROUPED,
        "rope_parameters": {**GROUPED["rope_parameters"], "partial_rotary_factor": 0.5},
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.7,
    },
    "Granite": {**COMMON, **GROUPED, **GRANITE},
    "GraniteMoe": {**COMMON, **GROUPED, **GRANITE, "num_local_experts": 8, "num_experts_per_tok": 3},
    "GraniteMoeShared": {
        **COMMON,
        **GROUPED,
        **GRANITE,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 20,
    },
    "MiMoV2Flash": {
        **COMMON,
        **GROUPED,
        "v_head_dim": 10,
        "sliding_window": 5,
        "attention_value_scale": 0.6,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        },
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.7,
    },
    "DeepseekV2": {**COMMON, **LATENT, "topk_method": "group_limited_greedy"},
    "DeepseekV3": {**COMMON, **LATENT},
    "Qwen3Next": {**HYBRID, "intermediate_size": 40},
    "Qwen3_5Moe": HYBRID,
}
"""Family (`{family}Config` and `{family}ForCausalLM` of transformers) -> the fields of its config."""


def make_checkpoint(path: Path | str, family: str, *, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """A random checkpoint at `path`.

    Args:
        path: the folder.
        family: one of `FAMILIES`, or any other of transformers if `overrides` say enough.
        max_shard_size: of its files.
        overrides: fields of the config; and `seed` and `dtype`.
    """
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(overrides.pop("seed", 0))
    dtype = overrides.pop("dtype", torch.float32)
    kind = f"{family}TextConfig" if family == "Qwen3_5Moe" else f"{family}Config"
    config = getattr(transformers, kind)(**{**FAMILIES.get(family, {}), **overrides})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            # As transformers makes them, norms are ones and biases zeros: forgetting one would not show.
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
                if family in ZERO_CENTRED and ".linear_attn." not in name:
                    tensor -= 1
            elif name.endswith("A_log"):  # slow decay: a lost state shows, and transformers' chunks are precise
                tensor.uniform_(-4, 0)
            elif "bias" in name:
                tensor.uniform_(-0.3, 0.3)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    return Path(path)


def make_qwen3_moe_checkpoint(path: Path | str, *, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """A random Qwen3-MoE checkpoint at `path`; see `make_checkpoint`."""
    return make_checkpoint(path, "Qwen3Moe", max_shard_size=max_shard_size, **overrides)


def load_reference(path: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """transformers' own model of a checkpoint, by default fp32, evaluation mode."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Logits of every position, `[tokens, vocab]`."""
    return model(torch.tensor([token_ids])).logits[0]


def reference_greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> tuple[list[int], list[Tensor]]:
    """Greedy tokens with transformers' own KV cache, and the logits `[vocab]` that each came from."""
    with torch.no_grad():
        out = model(torch.tensor([prompt]), use_cache=True)
        logits, tokens = [out.logits[0, -1]], [int(out.logits[0, -1].argmax())]
        while len(tokens) < num_tokens:
            out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits[0, -1])
            tokens.append(int(out.logits[0, -1].argmax()))
    return tokens, logits
