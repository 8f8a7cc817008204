"""Mixtral: grouped-query attention, over a sliding window where the config has one, and a MoE in every layer.

Source: Mixtral of Experts (2024) and the `MixtralForCausalLM` checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from model_runner.decoder.config import (
    DecoderConfig,
    MoEConfig,
    TensorNames,
    read_decoder,
    read_grouped_query,
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
        moe = MoEConfig(
            layers=frozenset(range(config.integer("num_hidden_layers"))),
            intermediate_size=config.integer("intermediate_size"),
            router=SoftmaxTopKRouter(read_top_k(config), renormalize=True),
            names=TensorNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
        )
        return read_decoder(config, generation, attention, rope=rope, moe=moe, default_eps=1e-5)
