"""Llama: grouped-query attention, dense MLPs.

Source: The Llama 3 Herd of Models (2024) and the `LlamaForCausalLM` checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from model_runner.decoder.config import DecoderConfig, read_decoder, read_grouped_query
from model_runner.decoder.decoder import DecoderLM
from model_runner.weights.hf_config import HFConfig


class LlamaForCausalLM(DecoderLM):
    """The model. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        attention = read_grouped_query(config)
        return read_decoder(config, generation, attention, flags=("attention_bias", "mlp_bias"))
