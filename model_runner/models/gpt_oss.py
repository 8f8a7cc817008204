"""gpt-oss: attention with sinks, over a sliding window in every other layer, and a MoE with biases in every layer.

Its experts clamp gates and ups. Experts in MXFP4, as published, are dequantised as they are read.

Source: gpt-oss-120b and gpt-oss-20b Model Card (2025) and the `GptOssForCausalLM` checkpoints on the Hugging Face hub.
"""

from typing import Any

from model_runner.decoder.config import DecoderConfig, TensorNames, read_decoder, read_grouped_query, read_layer_windows
from model_runner.decoder.decoder import DecoderLM
from model_runner.decoder.rope import read_rope
from model_runner.models.mistral import read_softmax_moe
from model_runner.weights.files import HFConfig
from moe import ClampedSwiGLU


class GptOssForCausalLM(DecoderLM):
    """The model. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        if not (config.values.get("rope_scaling") or config.values.get("rope_parameters")):
            raise config.wrong("rope_scaling", None, "the scaling it was trained with")
        num_layers = config.integer("num_hidden_layers")
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
        windows = read_layer_windows(config, config.optional_integer("sliding_window"), kinds)
        clamped = ClampedSwiGLU(config.number("swiglu_limit", 7.0), config.number("swiglu_alpha", 1.702))
        own: dict[str, Any] = {"gate_bias": True, "clamped": clamped, "names": TensorNames(router="router")}
        moe = read_softmax_moe(config, renormalize=True, **own)  # the softmax of the chosen ones only is the same
        attention = read_grouped_query(config, layer_windows=windows, sinks=True)
        rope = read_rope(config, default_theta=150_000.0)
        bias = config.flag("attention_bias", True)
        return read_decoder(config, generation, attention, rope=rope, moe=moe, default_eps=1e-5, attention_bias=bias)
