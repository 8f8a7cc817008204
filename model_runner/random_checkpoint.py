"""Checkpoints with random weights, in Hugging Face's layout, written without transformers.

For measuring, where speed matters and words do not. By default both have 8 layers of hidden size 512, 32 experts of 256
of which a token visits 4, and a vocabulary of 2,048:

    Qwen3-MoE      106 million parameters; 8 heads and 2 key/value heads of 64
    DeepSeek-V3    107 million; latent attention with 8 heads, two shared experts of 256, the first layer dense
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from ubatch import ConfigError

__all__ = ["RandomDeepseekV3", "RandomQwen3Moe", "make_random_checkpoint", "make_random_qwen3_moe"]

_Shapes = Iterator[tuple[str, tuple[int, ...]]]


class RandomModel(Protocol):
    """A model's size, and what its checkpoint holds."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...

    def hf_config(self, dtype: torch.dtype) -> dict[str, object]:
        """The content of `config.json`."""

    def tensors(self, layer: int) -> _Shapes:
        """Names and shapes of one layer's tensors."""


@dataclass(frozen=True)
class RandomQwen3Moe:
    """The size of the model; names as in `config.json`."""

    vocab_size: int = 2048
    hidden_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 256
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = True
    rope_theta: float = 1_000_000.0

    def hf_config(self, dtype: torch.dtype) -> dict[str, object]:
        """The content of `config.json`."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "dtype": str(dtype).removeprefix("torch."),
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": 1e-6,
            "intermediate_size": 3 * self.hidden_size,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "initializer_range": 0.02,
            "use_sliding_window": False,
            **vars(self),
        }

    def tensors(self, layer: int) -> _Shapes:
        """Names and shapes of one layer's tensors."""
        name, hidden = f"model.layers.{layer}", self.hidden_size
        yield from _norms(name, hidden)
        heads = {"q": self.num_attention_heads, "k": self.num_key_value_heads, "v": self.num_key_value_heads}
        for part, count in heads.items():
            yield f"{name}.self_attn.{part}_proj.weight", (count * self.head_dim, hidden)
        yield f"{name}.self_attn.o_proj.weight", (hidden, self.num_attention_heads * self.head_dim)
        for part in ("q", "k"):
            yield f"{name}.self_attn.{part}_norm.weight", (self.head_dim,)
        yield f"{name}.mlp.gate.weight", (self.num_experts, hidden)
        for expert in range(self.num_experts):
            yield from _gated(f"{name}.mlp.experts.{expert}", hidden, self.moe_intermediate_size)


@dataclass(frozen=True)
class RandomDeepseekV3:
    """The size of the model; names as in `config.json`."""

    vocab_size: int = 2048
    hidden_size: int = 512
    intermediate_size: int = 1536
    num_hidden_layers: int = 8
    first_k_dense_replace: int = 1
    num_attention_heads: int = 8
    q_lora_rank: int = 192
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    n_routed_experts: int = 32
    n_shared_experts: int = 2
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    moe_intermediate_size: int = 256
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = True
    rope_theta: float = 10_000.0

    def hf_config(self, dtype: torch.dtype) -> dict[str, object]:
        """The content of `config.json`."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "dtype": str(dtype).removeprefix("torch."),
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": 1e-6,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_key_value_heads": self.num_attention_heads,
            **vars(self),
        }

    def tensors(self, layer: int) -> _Shapes:
        """Names and shapes of one layer's tensors."""
        name, hidden, heads = f"model.layers.{layer}", self.hidden_size, self.num_attention_heads
        yield from _norms(name, hidden)
        attention = f"{name}.self_attn"
        yield f"{attention}.q_a_proj.weight", (self.q_lora_rank, hidden)
        yield f"{attention}.q_a_layernorm.weight", (self.q_lora_rank,)
        query_size = self.qk_nope_head_dim + self.qk_rope_head_dim
        yield f"{attention}.q_b_proj.weight", (heads * query_size, self.q_lora_rank)
        yield f"{attention}.kv_a_proj_with_mqa.weight", (self.kv_lora_rank + self.qk_rope_head_dim, hidden)
        yield f"{attention}.kv_a_layernorm.weight", (self.kv_lora_rank,)
        expanded = heads * (self.qk_nope_head_dim + self.v_head_dim)
        yield f"{attention}.kv_b_proj.weight", (expanded, self.kv_lora_rank)
        yield f"{attention}.o_proj.weight", (hidden, heads * self.v_head_dim)
        if layer < self.first_k_dense_replace:
            yield from _gated(f"{name}.mlp", hidden, self.intermediate_size)
            return
        yield f"{name}.mlp.gate.weight", (self.n_routed_experts, hidden)
        yield f"{name}.mlp.gate.e_score_correction_bias", (self.n_routed_experts,)
        yield from _gated(f"{name}.mlp.shared_experts", hidden, self.n_shared_experts * self.moe_intermediate_size)
        for expert in range(self.n_routed_experts):
            yield from _gated(f"{name}.mlp.experts.{expert}", hidden, self.moe_intermediate_size)


def _norms(name: str, hidden: int) -> _Shapes:
    yield f"{name}.input_layernorm.weight", (hidden,)
    yield f"{name}.post_attention_layernorm.weight", (hidden,)


def _gated(name: str, hidden: int, intermediate: int) -> _Shapes:
    for part in ("gate", "up"):
        yield f"{name}.{part}_proj.weight", (intermediate, hidden)
    yield f"{name}.down_proj.weight", (hidden, intermediate)


def make_random_qwen3_moe(
    path: str | Path,
    seed: int = 0,
    *,
    size: RandomQwen3Moe | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layers_per_shard: int | None = 4,
) -> Path:
    """A Qwen3-MoE, of about 100 million parameters by default; see `make_random_checkpoint`."""
    size = size if size is not None else RandomQwen3Moe()
    return make_random_checkpoint(path, size, seed, dtype=dtype, layers_per_shard=layers_per_shard)


def make_random_checkpoint(
    path: str | Path,
    size: RandomModel,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers_per_shard: int | None = 4,
) -> Path:
    """Write the checkpoint: the same seed, size and dtype give the same weights.

    Args:
        path: the folder; made if it is not there.
        size: of the model.
        seed: of the weights.
        dtype: of the stored tensors.
        layers_per_shard: how the files are cut; None for a single file.

    Returns:
        `path`.

    Raises:
        ConfigError: `layers_per_shard` is not positive.
    """
    if layers_per_shard is not None and layers_per_shard < 1:
        raise ConfigError(f"layers_per_shard must be at least 1, or None for a single file, not {layers_per_shard}.")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    shards = [
        [("model.embed_tokens.weight", (size.vocab_size, size.hidden_size)), ("model.norm.weight", (size.hidden_size,))]
    ]
    if not size.tie_word_embeddings:
        shards[0].append(("lm_head.weight", (size.vocab_size, size.hidden_size)))
    for layer in range(size.num_hidden_layers):
        if layers_per_shard is not None and layer % layers_per_shard == 0:
            shards.append([])
        shards[-1] += size.tensors(layer)
    single = len(shards) == 1
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _random(name, shape, generator, dtype) for name, shape in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if not single:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    # Last, so that a folder with a config is a complete checkpoint.
    (folder / "config.json").write_text(json.dumps(size.hf_config(dtype), indent=2) + "\n", encoding="utf-8")
    return folder


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Norms are 1 and biases 0; everything else keeps the scale of what it multiplies, so that activations stay of
    order 1.
    """
    if "norm" in name:
        return torch.ones(shape, dtype=dtype)
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=dtype)
    std = 1.0 if "embed" in name else shape[-1] ** -0.5
    return torch.randn(shape, generator=generator).mul_(std).to(dtype)
