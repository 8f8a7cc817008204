"""Checkpoints with random weights, in Hugging Face's layout, written without transformers.

For measuring speed, where the text does not matter. The list of tensors comes from the model class: it is loaded once
from a checkpoint that records every request. Weights are those of `load_format dummy`. By default both models have 8
layers of hidden size 512, 32 experts of 256 of which a token visits 4, and a vocabulary of 2,048:

    Qwen3-MoE      106 million parameters; 8 heads and 2 key/value heads of 64
    DeepSeek-V3    107 million; latent attention with 8 heads, two shared experts of 256, the first layer dense
"""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor

from model_runner.decoder.base import ExpertParallel
from model_runner.models.registry import model_class
from model_runner.parallel.expert_parallel import make_transport
from model_runner.weights.dummy_weights import DummyCheckpoint
from model_runner.weights.weights import Size, whole_shape
from ubatch import ConfigError

_COMMON = {"hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6, "norm_topk_prob": True}
"""Entries of `config.json` that both models have."""


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
            "dtype": str(dtype).removeprefix("torch."),
            **_COMMON,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "intermediate_size": 3 * self.hidden_size,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "initializer_range": 0.02,
            "use_sliding_window": False,
            **vars(self),
        }


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
            "dtype": str(dtype).removeprefix("torch."),
            **_COMMON,
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_key_value_heads": self.num_attention_heads,
            **vars(self),
        }


RandomModel: TypeAlias = RandomQwen3Moe | RandomDeepseekV3


def make_random_qwen3_moe(
    path: str | Path,
    seed: int = 0,
    *,
    size: RandomQwen3Moe | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layers_per_shard: int | None = 4,
) -> Path:
    """A Qwen3-MoE, of about 100 million parameters by default; see `make_random_checkpoint`."""
    return make_random_checkpoint(path, size or RandomQwen3Moe(), seed, dtype=dtype, layers_per_shard=layers_per_shard)


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
        path: the folder; created if it is missing.
        size: sizes of the model.
        seed: seed of the weights.
        dtype: dtype of the stored tensors.
        layers_per_shard: decoder layers per file; None for a single file.

    Returns:
        `path`.

    Raises:
        ConfigError: `layers_per_shard` is not positive.
    """
    if layers_per_shard is not None and layers_per_shard < 1:
        raise ConfigError(f"layers_per_shard must be at least 1, or None for a single file, not {layers_per_shard}.")
    weights = weights_of(size, dtype, seed)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    shards: defaultdict[int, list[str]] = defaultdict(list)
    for name in weights.shapes:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        shards[0 if layer is None or layers_per_shard is None else 1 + int(layer[1]) // layers_per_shard].append(name)
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards.values(), 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: weights.tensor(name) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    # Written last, so that a folder with a config is a complete checkpoint.
    _write_config(folder, size, dtype)
    return folder


class RandomWeights(DummyCheckpoint):
    """Random weights of a model; loading the model records their names and shapes.

    Attributes:
        shapes: name -> shape of every tensor that was loaded.
    """

    def __init__(self, path: str | Path, **options: Any) -> None:
        super().__init__(path, **options)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def _copy(self, name: str, shape: Sequence[Size], out: Tensor) -> None:
        self.shapes[name] = whole_shape(shape)

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name."""
        return self._whole(name, self.shapes[name]).to(self.dtype).clone(memory_format=torch.contiguous_format)


def weights_of(size: RandomModel, dtype: torch.dtype, seed: int = 0) -> RandomWeights:
    """All weights of a model."""
    with TemporaryDirectory() as folder:
        _write_config(Path(folder), size, dtype)
        weights = RandomWeights(folder, dtype=dtype, seed=seed)
        kind = model_class(weights.architecture, weights.config)
        config = kind.read_config(weights.config, weights.generation_config())
    kind.load(config, weights, ExpertParallel(make_transport(None, None, None, config.num_experts)))
    return weights


def _write_config(folder: Path, size: RandomModel, dtype: torch.dtype) -> None:
    (folder / "config.json").write_text(json.dumps(size.hf_config(dtype), indent=2) + "\n", encoding="utf-8")
