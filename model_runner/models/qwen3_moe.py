"""Qwen3-MoE: grouped-query attention with normalised queries and keys, and a softmax-routed MoE.

Layers named in `mlp_only_layers`, or skipped by `decoder_sparse_step`, have a dense MLP instead.

Source: Qwen3 Technical Report (2025) and the `Qwen3MoeForCausalLM` checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from model_runner.decoder.config import DecoderConfig, read_decoder, read_grouped_query
from model_runner.decoder.decoder import DecoderLM
from model_runner.models.mixtral import read_softmax_moe
from model_runner.models.qwen2 import read_sliding_window
from model_runner.models.qwen2_moe import read_sparse_layers
from model_runner.weights.hf_config import HFConfig


class Qwen3MoeForCausalLM(DecoderLM):
    """The model. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        renormalize, layers = config.flag("norm_topk_prob", False), read_sparse_layers(config)
        moe = read_softmax_moe(config, renormalize=renormalize, layers=layers, size="moe_intermediate_size")
        attention = read_grouped_query(config, sliding_window=read_sliding_window(config))
        return read_decoder(config, generation, attention, moe=moe, flags=("attention_bias",), qk_norm=True)
