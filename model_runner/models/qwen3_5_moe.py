"""Qwen3.5-MoE: the text model, which is Qwen3-Next with its projections of linear attention stored apart.

Checkpoints of the whole model (`Qwen3_5MoeForConditionalGeneration`) can be read; what sees images is left out.

Source: the `Qwen3_5MoeForConditionalGeneration` checkpoints on the Hugging Face hub (2026).
"""

from __future__ import annotations

from collections.abc import Mapping

from model_runner.decoder.config import DecoderConfig
from model_runner.models.mtp import LayersApart
from model_runner.models.qwen3_next import read_hybrid
from model_runner.weights.hf_config import HFConfig
from model_runner.weights.weights import Checkpoint


class Qwen35MoeForCausalLM(LayersApart):
    """The text model. See `CausalLM`."""

    tensor_prefix = "model"

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        layers = range(config.integer("num_hidden_layers"))
        # It has no dense MLP, and its config no size of one.
        config = HFConfig({"intermediate_size": config.integer("moe_intermediate_size"), **config.values}, config.path)
        return read_hybrid(config, generation, sparse=layers, renormalize=True, tensor_prefix=cls.tensor_prefix)


class Qwen35MoeForConditionalGeneration(Qwen35MoeForCausalLM):
    """The text model of a checkpoint that can see. See `CausalLM`."""

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
