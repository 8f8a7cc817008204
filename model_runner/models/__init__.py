"""Model families, and the registry that finds one for a checkpoint.

base, registry         what the runner asks of a model; which class an architecture is
config, decoder        what families differ in, and the decoder that they share
ops                    its small operations, each one kernel on a GPU
rope, layers           its parts: rotary embeddings, attention, the dense MLP,
latent_attention       multi-head latent attention,
sparse_mlp             and the mixture of experts
scatter                how rows lie, and move, where ranks share attention
llama, qwen3, qwen3_moe, mixtral, deepseek_v2, deepseek_v3   one family each: how to read its `config.json`

`docs/adding-a-model.md` shows how to add one.
"""

from model_runner.decoder.base import CausalLM, ExpertParallel, ModelConfig
from model_runner.decoder.config import (
    DecoderConfig,
    MoEConfig,
    TensorNames,
    read_decoder,
    read_grouped_query,
    read_num_experts,
    read_top_k,
)
from model_runner.decoder.decoder import DecoderLM
from model_runner.decoder.rope import Rope, read_rope
from model_runner.models.registry import known_architectures, model_class, register_model

__all__ = [
    "CausalLM",
    "DecoderConfig",
    "DecoderLM",
    "ExpertParallel",
    "MoEConfig",
    "ModelConfig",
    "Rope",
    "TensorNames",
    "known_architectures",
    "model_class",
    "read_decoder",
    "read_grouped_query",
    "read_num_experts",
    "read_rope",
    "read_top_k",
    "register_model",
]
