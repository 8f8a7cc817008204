"""Qwen's models whose layers all have grouped-query attention.

    Qwen2, Qwen2.5    query, key and value projections have biases; dense MLPs
    Qwen2-MoE         the same attention, and a softmax-routed MoE whose shared expert has a gate
    Qwen3             queries and keys are normalised; dense MLPs
    Qwen3-MoE         the same attention, and a softmax-routed MoE

Layers named in `mlp_only_layers`, or skipped by `decoder_sparse_step`, have a dense MLP instead of a MoE.

Source: Qwen2 Technical Report, Qwen1.5-MoE (2024), Qwen3 Technical Report (2025) and the `Qwen2ForCausalLM`,
`Qwen2MoeForCausalLM`, `Qwen3ForCausalLM` and `Qwen3MoeForCausalLM` checkpoints on the Hugging Face hub.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from model_runner.decoder import DecoderConfig
from model_runner.decoder.config import MoEConfig, TensorNames, read_decoder, read_grouped_query, read_layer_windows
from model_runner.decoder.decoder import DecoderLM
from model_runner.models.mistral import read_softmax_moe
from model_runner.weights.files import HFConfig

_SLIDING_WINDOW = 4096
"""The window if `use_sliding_window` is set and the config has no entry for it; null is no window."""


class Qwen2ForCausalLM(DecoderLM):
    """Qwen2. See `CausalLM`."""

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


class Qwen2MoeForCausalLM(DecoderLM):
    """Qwen2-MoE. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        renormalize = config.flag("norm_topk_prob", False)
        moe = read_gated_moe(config, read_sparse_layers(config), renormalize=renormalize)
        attention = read_grouped_query(config, layer_windows=_windows(config))
        return read_decoder(config, generation, attention, moe=moe, qkv_bias=config.flag("qkv_bias", True))


def _windows(config: HFConfig) -> list[int | None]:
    """The sliding window of every layer: by default of every other one before `max_window_layers`."""
    used, last = config.flag("use_sliding_window", False), config.integer("max_window_layers", default=28, at_least=0)
    slides = [used and layer % 2 == 0 and layer < last for layer in range(config.integer("num_hidden_layers"))]
    return read_qwen_windows(config, ["sliding_attention" if each else "full_attention" for each in slides])


def read_gated_moe(config: HFConfig, layers: Iterable[int], *, renormalize: bool) -> MoEConfig:
    """The MoE of some layers, with a shared expert that has a gate; see `read_softmax_moe`."""
    names, shared = TensorNames(shared="mlp.shared_expert"), config.integer("shared_expert_intermediate_size")
    own: dict[str, Any] = {"shared_intermediate_size": shared, "shared_gate": True, "names": names}
    return read_softmax_moe(config, renormalize=renormalize, layers=layers, size="moe_intermediate_size", **own)


def read_sparse_layers(config: HFConfig) -> frozenset[int]:
    """Numbers of the layers with a MoE."""
    dense, step = frozenset(config.integers("mlp_only_layers")), config.integer("decoder_sparse_step", default=1)
    layers = range(config.integer("num_hidden_layers"))
    return frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)


class Qwen3ForCausalLM(DecoderLM):
    """Qwen3. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        attention = read_grouped_query(config, layer_windows=read_windows(config))
        return read_decoder(config, generation, attention, flags=("attention_bias",), qk_norm=True)


class Qwen3MoeForCausalLM(DecoderLM):
    """Qwen3-MoE. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        renormalize, layers = config.flag("norm_topk_prob", False), read_sparse_layers(config)
        moe = read_softmax_moe(config, renormalize=renormalize, layers=layers, size="moe_intermediate_size")
        attention = read_grouped_query(config, sliding_window=read_sliding_window(config))
        return read_decoder(config, generation, attention, moe=moe, flags=("attention_bias",), qk_norm=True)
