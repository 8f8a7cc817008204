"""Qwen3: grouped-query attention with normalised queries and keys, dense MLPs.

Source: Qwen3 Technical Report (2025) and the `Qwen3ForCausalLM` checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from dataclasses import replace

from model_runner.decoder.config import DecoderConfig, read_decoder, read_grouped_query
from model_runner.decoder.decoder import DecoderLM
from model_runner.weights.hf_config import HFConfig

__all__ = ["Qwen3ForCausalLM", "read_sliding_window"]


class Qwen3ForCausalLM(DecoderLM):
    """The model. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        window = read_sliding_window(config) if _all_layers_slide(config) else None
        return replace(
            read_decoder(config, generation, read_grouped_query(config, sliding_window=window)),
            attention_bias=config.flag("attention_bias", False),
            qk_norm=True,
        )


def read_sliding_window(config: HFConfig) -> int | None:
    """The sliding window in tokens; None unless `use_sliding_window` is set."""
    return config.optional_integer("sliding_window") if config.flag("use_sliding_window", False) else None


def _all_layers_slide(config: HFConfig) -> bool:
    """True if every layer uses the sliding window, False if none does.

    Raises:
        CheckpointError: only some layers use it; one attention plan per step must fit all layers.
    """
    num_layers = config.integer("num_hidden_layers")
    if read_sliding_window(config) is None:
        return False
    kinds = config.values.get("layer_types")
    if kinds is None:
        full = min(num_layers, config.integer("max_window_layers", default=28, at_least=0))
        kinds = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
    if len(set(kinds)) > 1:
        raise config.wrong("layer_types", kinds, "the same attention in all layers")
    return "sliding_attention" in kinds
