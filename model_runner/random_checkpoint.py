"""A Qwen3-MoE checkpoint with random weights, in Hugging Face's layout, written without transformers.

For measuring, where speed matters and words do not. The default has 106 million parameters: hidden 512, 8 layers, 32
experts of 256 of which a token visits 4, 8 heads and 2 key/value heads of 64, a vocabulary of 2,048.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ubatch import ConfigError

__all__ = ["RandomQwen3Moe", "make_random_qwen3_moe"]


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

    def tensors(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of one layer's tensors."""
        name, hidden = f"model.layers.{layer}", self.hidden_size
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
        heads = {"q": self.num_attention_heads, "k": self.num_key_value_heads, "v": self.num_key_value_heads}
        for part, count in heads.items():
            yield f"{name}.self_attn.{part}_proj.weight", (count * self.head_dim, hidden)
        yield f"{name}.self_attn.o_proj.weight", (hidden, self.num_attention_heads * self.head_dim)
        for part in ("q", "k"):
            yield f"{name}.self_attn.{part}_norm.weight", (self.head_dim,)
        yield f"{name}.mlp.gate.weight", (self.num_experts, hidden)
        for expert in range(self.num_experts):
            for part in ("gate", "up"):
                yield f"{name}.mlp.experts.{expert}.{part}_proj.weight", (self.moe_intermediate_size, hidden)
            yield f"{name}.mlp.experts.{expert}.down_proj.weight", (hidden, self.moe_intermediate_size)


def make_random_qwen3_moe(
    path: str | Path,
    seed: int = 0,
    *,
    size: RandomQwen3Moe | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layers_per_shard: int | None = 4,
) -> Path:
    """Write the checkpoint: the same seed, size and dtype give the same weights.

    Args:
        path: the folder; made if it is not there.
        seed: of the weights.
        size: of the model; about 100 million parameters by default.
        dtype: of the stored tensors.
        layers_per_shard: how the files are cut; None for a single file.

    Returns:
        `path`.

    Raises:
        ConfigError: `layers_per_shard` is not positive.
    """
    if layers_per_shard is not None and layers_per_shard < 1:
        raise ConfigError(f"layers_per_shard must be at least 1, or None for a single file, not {layers_per_shard}.")
    size = size if size is not None else RandomQwen3Moe()
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
    """Norms are 1; everything else keeps the scale of what it multiplies, so that activations stay of order 1."""
    if "norm" in name:
        return torch.ones(shape, dtype=dtype)
    std = 1.0 if "embed" in name else shape[-1] ** -0.5
    return torch.randn(shape, generator=generator).mul_(std).to(dtype)
