"""Qwen2 and Qwen2.5: grouped-query attention whose query, key and value projections have biases, dense MLPs.

Source: Qwen2 Technical Report (2024) and the `Qwen2ForCausalLM` checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Sequence

from model_runner.decoder.config import DecoderConfig, read_decoder, read_grouped_query, read_layer_windows
from model_runner.decoder.decoder import DecoderLM
from model_runner.weights.hf_config import HFConfig

_SLIDING_WINDOW = 4096
"""The window if `use_sliding_window` is set and the config has no entry for it; null is no window."""


class Qwen2ForCausalLM(DecoderLM):
    """The model. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        attention = read_grouped_query(config, layer_windows=read_windows(config))
        return read_decoder(config, generation, attention, qkv_bias=True)


def read_sliding_window(config: HFConfig) -> int | None:
    """The sliding window in tokens; None unless `use_sliding_window` is set."""
    if not config.flag("use_sliding_window", False):
        return None
    return config.optional_integer("sliding_window", _SLIDING_WINDOW)


def read_windows(config: HFConfig) -> list[int | None]:
    """The sliding window in tokens of every layer; None for a layer without one.

    Raises:
        CheckpointError: see `read_qwen_windows`.
    """
    num_layers = config.integer("num_hidden_layers")
    full = min(num_layers, config.integer("max_window_layers", default=28, at_least=0))
    if read_sliding_window(config) is None:
        full = num_layers
    return read_qwen_windows(config, ["full_attention"] * full + ["sliding_attention"] * (num_layers - full))


def read_qwen_windows(config: HFConfig, default: Sequence[str]) -> list[int | None]:
    """As `read_windows`, for a family with its own `default` of `layer_types`.

    Raises:
        CheckpointError: layers have a window that is switched off; or see `read_layer_windows`.
    """
    given = config.words("layer_types")
    if given and "sliding_attention" in given and not config.flag("use_sliding_window", False):
        raise config.wrong("layer_types", given, "'full_attention' in all layers unless use_sliding_window is set")
    return read_layer_windows(config, read_sliding_window(config), default)
