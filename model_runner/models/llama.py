"""Llama: grouped-query attention, dense MLPs. And Granite 3: Llama's decoder with four factors of its own, dense, or
with a MoE in every layer.

Granite-MoE keeps all experts of a layer in two tensors. `GraniteMoeShared` adds an expert that every token visits.

Source: The Llama 3 Herd of Models, Granite 3.0 Language Models (2024) and the `LlamaForCausalLM`, `GraniteForCausalLM`,
`GraniteMoeForCausalLM` and `GraniteMoeSharedForCausalLM` checkpoints on the Hugging Face hub.
"""

from dataclasses import replace
from typing import Any

from model_runner.decoder.config import DecoderConfig, MoEConfig, TensorNames, read_decoder, read_grouped_query
from model_runner.decoder.decoder import DecoderLM
from model_runner.models.mistral import read_softmax_moe
from model_runner.weights.files import HFConfig


class LlamaForCausalLM(DecoderLM):
    """Llama. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        attention = read_grouped_query(config)
        return read_decoder(config, generation, attention, flags=("attention_bias", "mlp_bias"))


_NAMES = TensorNames(
    block="block_sparse_moe",
    router="router.layer",
    stacked=("input_linear.weight", "output_linear.weight"),
    shared="shared_mlp",
    shared_fused=("input_linear", "output_linear"),
)


class GraniteForCausalLM(DecoderLM):
    """Dense Granite. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        return _read_granite(config, generation, "mlp_bias")


class GraniteMoeForCausalLM(DecoderLM):
    """Granite with a MoE in every layer, of GraniteMoeShared with a shared expert. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        shared = config.integer("shared_intermediate_size", default=0, at_least=0)
        moe = read_softmax_moe(config, renormalize=True, shared_intermediate_size=shared, names=_NAMES)
        return _read_granite(config, generation, moe=moe)


def _read_granite(config: HFConfig, generation: HFConfig, *flags: str, moe: MoEConfig | None = None) -> DecoderConfig:
    """Read the entries that the models share: Llama's, and the factors."""
    attention = replace(read_grouped_query(config), scale=config.number("attention_multiplier", 1.0))
    factors: dict[str, Any] = {
        name: config.number(name, 1.0) for name in ("embedding_multiplier", "residual_multiplier")
    }
    factors["logits_divisor"] = config.number("logits_scaling", 1.0)
    return read_decoder(config, generation, attention, moe=moe, flags=("attention_bias", *flags), **factors)
