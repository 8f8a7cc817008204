"""Qwen2 and Qwen2.5: grouped-query attention whose query, key and value projections have biases, dense MLPs.

Source: Qwen2 Technical Report (2024) and the `Qwen2ForCausalLM` checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from dataclasses import replace

from model_runner.decoder.config import DecoderConfig, read_decoder, read_grouped_query, read_layer_windows
from model_runner.decoder.decoder import DecoderLM
from model_runner.weights.hf_config import HFConfig

__all__ = ["Qwen2ForCausalLM", "read_sliding_window", "read_windows"]


class Qwen2ForCausalLM(DecoderLM):
    """The model. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        attention = read_grouped_query(config, layer_windows=read_windows(config))
        return replace(read_decoder(config, generation, attention), qkv_bias=True)


def read_sliding_window(config: HFConfig) -> int | None:
    """The sliding window in tokens; None unless `use_sliding_window` is set."""
    return config.optional_integer("sliding_window") if config.flag("use_sliding_window", False) else None


def read_windows(config: HFConfig) -> list[int | None]:
    """The sliding window in tokens of every layer; None for a layer without one.

    Raises:
        CheckpointError: see `read_layer_windows`.
    """
    num_layers, window = config.integer("num_hidden_layers"), read_sliding_window(config)
    if window is None:
        return [None] * num_layers
    full = min(num_layers, config.integer("max_window_layers", default=28, at_least=0))
    kinds = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
    return read_layer_windows(config, window, kinds)
