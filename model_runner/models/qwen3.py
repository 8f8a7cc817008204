"""Qwen3: grouped-query attention with normalised queries and keys, dense MLPs.

Source: Qwen3 Technical Report (2025) and the `Qwen3ForCausalLM` checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from model_runner.decoder.config import DecoderConfig, read_decoder, read_grouped_query
from model_runner.decoder.decoder import DecoderLM
from model_runner.models.qwen2 import read_windows
from model_runner.weights.hf_config import HFConfig


class Qwen3ForCausalLM(DecoderLM):
    """The model. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        attention = read_grouped_query(config, layer_windows=read_windows(config))
        return read_decoder(config, generation, attention, flags=("attention_bias",), qk_norm=True)
