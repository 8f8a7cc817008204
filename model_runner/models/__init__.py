"""Model families, and the registry that finds one for a checkpoint.

registry               finds the class for an architecture, and holds a checkpoint's files against what it reads
llama (and Granite), mistral (and Mixtral), qwen, qwen_hybrid, olmoe, gpt_oss, mimo_v2_flash, deepseek (and GLM-4.5)
                       families that share entries of their `config.json`: how to read it
draft_heads            an EAGLE-style draft head; the multi-token-prediction layer of DeepSeek, GLM-4.5 and Qwen3-Next

The decoder that families share is in `model_runner.decoder`; what a new family needs of it can be imported from here.

`docs/adding-a-model.md` shows how to add one.
"""

from model_runner.decoder.base import CausalLM, ExpertParallel, ModelConfig
from model_runner.decoder.config import (
    DecoderConfig,
    MoEConfig,
    TensorNames,
    read_decoder,
    read_grouped_query,
    read_layer_windows,
    read_num_experts,
    read_top_k,
)
from model_runner.decoder.decoder import DecoderLM
from model_runner.decoder.rope import Rope, read_rope
from model_runner.models.draft_heads import has_layer, no_layer
from model_runner.models.registry import known_architectures, model_class, read_sizes, register_model

__all__ = [
    "CausalLM",
    "DecoderConfig",
    "DecoderLM",
    "ExpertParallel",
    "MoEConfig",
    "ModelConfig",
    "Rope",
    "TensorNames",
    "has_layer",
    "known_architectures",
    "model_class",
    "no_layer",
    "read_decoder",
    "read_grouped_query",
    "read_layer_windows",
    "read_num_experts",
    "read_rope",
    "read_sizes",
    "read_top_k",
    "register_model",
]
