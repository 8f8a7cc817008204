"""Mixtral: grouped-query attention, over a sliding window where the config has one, and a MoE in every layer.

Source: Mixtral of Experts (2024) and the `MixtralForCausalLM` checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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


class MixtralForCausalLM(DecoderLM):
    """The model. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        attention = read_grouped_query(config, sliding_window=config.optional_integer("sliding_window"))
        rope = read_rope(config, default_theta=1_000_000.0)
        names = TensorNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
        moe = read_softmax_moe(config, renormalize=True, names=names)
        return read_decoder(config, generation, attention, rope=rope, moe=moe, default_eps=1e-5)


def read_softmax_moe(
    config: HFConfig,
    *,
    renormalize: bool,
    layers: Iterable[int] | None = None,
    size: str = "intermediate_size",
    **differences: Any,
) -> MoEConfig:
    """A MoE whose router scores experts by a softmax.

    Args:
        renormalize: the weights of a token's experts add up to 1.
        layers: numbers of the layers with a MoE; all of them by default.
        size: the entry with the intermediate size of an expert.
        differences: other fields of `MoEConfig`.
    """
    if layers is None:
        layers = range(config.integer("num_hidden_layers"))
    router = SoftmaxTopKRouter(read_top_k(config), renormalize=renormalize)
    return MoEConfig(frozenset(layers), config.integer(size), router, **differences)
