"""Small Qwen3-MoE checkpoints, written by transformers itself, and its answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # else imported where it is used: ranks that only run checkpoints start seconds earlier
    from transformers import Qwen3MoeForCausalLM


def make_qwen3_moe_checkpoint(path: Path | str, *, max_shard_size: str = "5GB", **config_overrides: Any) -> Path:
    """A random checkpoint at `path`; `config_overrides` are fields of `Qwen3MoeConfig`, `seed` and `dtype` besides.

    Two sparse layers around a dense one, grouped heads, a head dimension that is not hidden / heads.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    seed = config_overrides.pop("seed", 0)
    dtype = config_overrides.pop("dtype", torch.float32)
    values: dict[str, Any] = {
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "max_position_embeddings": 256,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
        "initializer_range": 0.15,  # far from uniform logits, so that a wrong layer shows
        "eos_token_id": None,
        **config_overrides,
    }
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a forgotten norm weight
                parameter.uniform_(0.5, 1.5)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    return Path(path)


def load_reference(path: Path | str) -> Qwen3MoeForCausalLM:
    """transformers' own model of a checkpoint, fp32, evaluation mode."""
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def reference_logits(model: Qwen3MoeForCausalLM, token_ids: list[int]) -> Tensor:
    """Logits of every position, `[tokens, vocab]`."""
    return model(torch.tensor([token_ids])).logits[0]


def reference_greedy(model: Qwen3MoeForCausalLM, prompt: list[int], num_tokens: int) -> tuple[list[int], list[Tensor]]:
    """Greedy tokens with transformers' own KV cache, and the logits `[vocab]` that each came from."""
    with torch.no_grad():
        out = model(torch.tensor([prompt]), use_cache=True)
        logits, tokens = [out.logits[0, -1]], [int(out.logits[0, -1].argmax())]
        while len(tokens) < num_tokens:
            out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits[0, -1])
            tokens.append(int(out.logits[0, -1].argmax()))
    return tokens, logits
