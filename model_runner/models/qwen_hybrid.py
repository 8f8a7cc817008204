"""Qwen3-Next: linear attention in most layers, gated grouped-query attention in the others, and a MoE in every layer.

Layers with linear attention keep a recurrent state per request (`model_runner.decoder.layers`). The
multi-token-prediction layer in published checkpoints is not loaded here (see `model_runner.models.draft_heads`).

Qwen3.5-MoE: the text model, which is Qwen3-Next with its projections of linear attention stored apart. Checkpoints of
the whole model (`Qwen3_5MoeForConditionalGeneration`) can be read; what sees images is left out.

Source: the `Qwen3NextForCausalLM` (2025) and `Qwen3_5MoeForConditionalGeneration` (2026) checkpoints on the Hugging
Face hub.
"""

from collections.abc import Collection, Mapping
from typing import Any

from attention import GatedDeltaShape
from model_runner.decoder.config import DecoderConfig, read_decoder, read_grouped_query
from model_runner.decoder.rope import read_rope
from model_runner.models.draft_heads import LayersApart
from model_runner.models.qwen import read_gated_moe, read_sparse_layers
from model_runner.weights.files import HFConfig
from model_runner.weights.weights import Checkpoint

_LINEAR, _FULL = "linear_attention", "full_attention"


class Qwen3NextForCausalLM(LayersApart):
    """Qwen3-Next. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        renormalize = config.flag("norm_topk_prob", True)
        sparse = read_sparse_layers(config)
        return read_hybrid(config, generation, sparse=sparse, renormalize=renormalize, linear_grouped=True)


def read_hybrid(
    config: HFConfig, generation: HFConfig, *, sparse: Collection[int], renormalize: bool, **differences: Any
) -> DecoderConfig:
    """Read the config entries that Qwen3-Next and Qwen3.5 share.

    Args:
        sparse: numbers of the layers with a MoE.
        renormalize: the weights of a token's experts add up to 1.

    Raises:
        CheckpointError: an entry is missing or invalid, or no layer has full attention.
    """
    moe = read_gated_moe(config, sparse, renormalize=renormalize)
    rope = read_rope(config, default_partial=0.25)
    differences |= {"qk_norm": True, "output_gate": True, "zero_centred_norms": True}
    differences |= {"linear": _read_linear(config), "linear_layers": _linear_layers(config)}
    attention = read_grouped_query(config)
    return read_decoder(config, generation, attention, rope=rope, moe=moe, flags=("attention_bias",), **differences)


def _read_linear(config: HFConfig) -> GatedDeltaShape:
    num_k_heads, num_v_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    if num_v_heads % num_k_heads:
        raise config.wrong("linear_num_value_heads", num_v_heads, f"a multiple of its {num_k_heads} key heads")
    k_dim, v_dim = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    return GatedDeltaShape(num_k_heads, num_v_heads, k_dim, v_dim, config.integer("linear_conv_kernel_dim", default=4))


def _linear_layers(config: HFConfig) -> frozenset[int]:
    num_layers = config.integer("num_hidden_layers")
    kinds = config.words("layer_types")
    if kinds is None:
        every = config.integer("full_attention_interval", default=4)
        kinds = [_LINEAR if (layer + 1) % every else _FULL for layer in range(num_layers)]
    if len(kinds) != num_layers or not {_FULL} <= set(kinds) <= {_FULL, _LINEAR}:
        wanted = f"{_LINEAR!r} or {_FULL!r} for each of its {num_layers} layers, {_FULL!r} at least once"
        raise config.wrong("layer_types", kinds, wanted)
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == _LINEAR)


class Qwen35MoeForCausalLM(LayersApart):
    """The text model of Qwen3.5-MoE. See `CausalLM`."""

    tensor_prefix = "model"

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        layers = range(config.integer("num_hidden_layers"))
        # It has no dense MLP, and its config no size of one.
        config = HFConfig({"intermediate_size": config.integer("moe_intermediate_size"), **config.values}, config.path)
        return read_hybrid(config, generation, sparse=layers, renormalize=True, tensor_prefix=cls.tensor_prefix)


class Qwen35MoeForConditionalGeneration(Qwen35MoeForCausalLM):
    """Qwen3.5-MoE: the text model of a checkpoint that can see. See `CausalLM`."""

    tensor_prefix = "model.language_model"

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        text = config.values.get("text_config")
        if not isinstance(text, dict):
            raise config.wrong("text_config", text, "the settings of its text model")
        values = {"tie_word_embeddings": config.flag("tie_word_embeddings", False), **text}
        return super().read_config(HFConfig(values, config.path), generation)

    @classmethod
    def left(cls, config: DecoderConfig, checkpoint: Checkpoint) -> Mapping[str, str]:
        """See `CausalLM.left`."""
        return {**super().left(config, checkpoint), "vision tower, which is not served": r"model\.visual\..*"}
