"""A small dense checkpoint, written without transformers: machines with a GPU may lack it."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from model_runner import RandomQwen3Moe, make_random_qwen3_moe


@dataclass(frozen=True)
class DenseQwen3(RandomQwen3Moe):
    """Qwen3 without experts."""

    def hf_config(self, dtype: torch.dtype) -> dict[str, object]:
        """The content of `config.json`."""
        return {**super().hf_config(dtype), "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


SMALL_MOE = RandomQwen3Moe(
    vocab_size=384,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    max_position_embeddings=256,
)


def make_small(path: Path, *, dense: bool, layers: int = 2) -> Path:
    """A float32 checkpoint with or without experts."""
    size = replace(DenseQwen3(**vars(SMALL_MOE)) if dense else SMALL_MOE, num_hidden_layers=layers)
    return make_random_qwen3_moe(path, size=size, dtype=torch.float32, layers_per_shard=None)
