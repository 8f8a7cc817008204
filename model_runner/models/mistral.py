"""Mistral: grouped-query attention, over a sliding window where the config has one, dense MLPs.

Source: Mistral 7B (2023) and the `MistralForCausalLM` checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from model_runner.decoder.config import DecoderConfig, read_decoder, read_grouped_query
from model_runner.decoder.decoder import DecoderLM
from model_runner.weights.hf_config import HFConfig

_SLIDING_WINDOW = 4096
"""The window if the config has no entry for it; null is no window."""


class MistralForCausalLM(DecoderLM):
    """The model. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        kinds = config.words("layer_types")
        if kinds is not None and len(set(kinds)) > 1:
            raise config.wrong("layer_types", kinds, "the same attention in all layers (others are Ministral's)")
        window = config.optional_integer("sliding_window", _SLIDING_WINDOW)
        return read_decoder(config, generation, read_grouped_query(config, sliding_window=window))
