"""OLMoE: attention that normalises a token's queries, and its keys, over all heads together, and a MoE in every layer.

Source: OLMoE (2024) and the `OlmoeForCausalLM` checkpoints on the Hugging Face hub.
"""

from typing import Any

from model_runner.decoder.config import DecoderConfig, read_decoder, read_grouped_query
from model_runner.decoder.decoder import DecoderLM
from model_runner.models.mistral import read_softmax_moe
from model_runner.weights.files import HFConfig


class OlmoeForCausalLM(DecoderLM):
    """The model. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        moe = read_softmax_moe(config, renormalize=config.flag("norm_topk_prob", False))
        own: dict[str, Any] = {"moe": moe, "default_eps": 1e-5, "norms_all_heads": True}
        if config.values.get("clip_qkv") is not None:
            own["clip_qkv"] = config.number("clip_qkv")
        return read_decoder(config, generation, read_grouped_query(config), flags=("attention_bias",), **own)
