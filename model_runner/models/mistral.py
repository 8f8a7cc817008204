"""Mistral: grouped-query attention, over a sliding window where the config has one, dense MLPs. And Mixtral: the same
attention, and a MoE in every layer.

Source: Mistral 7B (2023), Mixtral of Experts (2024) and the `MistralForCausalLM` and `MixtralForCausalLM` checkpoints
on the Hugging Face hub.
"""

from collections.abc import Iterable
from typing import Any

from model_runner.decoder import DecoderConfig
from model_runner.decoder.config import MoEConfig, TensorNames, read_decoder, read_grouped_query, read_top_k
from model_runner.decoder.decoder import DecoderLM
from model_runner.decoder.rope import read_rope
from model_runner.weights.files import HFConfig
from moe import SoftmaxTopKRouter

_SLIDING_WINDOW = 4096
"""The window if the config has no entry for it; null is no window."""


class MistralForCausalLM(DecoderLM):
    """Mistral. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        kinds = config.words("layer_types")
        if kinds is not None and len(set(kinds)) > 1:
            raise config.wrong("layer_types", kinds, "the same attention in all layers (others are Ministral's)")
        window = config.optional_integer("sliding_window", _SLIDING_WINDOW)
        return read_decoder(config, generation, read_grouped_query(config, sliding_window=window))


class MixtralForCausalLM(DecoderLM):
    """Mixtral. See `CausalLM`."""

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
