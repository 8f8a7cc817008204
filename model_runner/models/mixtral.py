"""Mixtral: grouped-query attention, over a sliding window where the config has one, and a MoE in every layer.

Source: Mixtral of Experts (2024) and the `MixtralForCausalLM` checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from dataclasses import replace

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
from model_runner.decoder.rope import read_rope
from model_runner.weights.hf_config import HFConfig
from moe import SoftmaxTopKRouter

__all__ = ["MixtralForCausalLM"]


class MixtralForCausalLM(DecoderLM):
    """The model. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        attention = read_grouped_query(config, sliding_window=config.optional_integer("sliding_window"))
        rope = read_rope(config, default_theta=1_000_000.0)
        common = read_decoder(config, generation, attention, rope=rope, default_eps=1e-5)
        top_k = read_top_k(config)
        moe = MoEConfig(
            layers=frozenset(range(common.num_layers)),
            intermediate_size=common.intermediate_size,
            router=SoftmaxTopKRouter(top_k, renormalize=True),
            names=TensorNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
        )
        return replace(common, num_experts=read_num_experts(config), num_experts_per_tok=top_k, moe=moe)
