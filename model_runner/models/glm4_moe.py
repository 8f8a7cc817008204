"""GLM-4.5: attention that rotates half of every head, and DeepSeek-V3's router with shared experts.

The first `first_k_dense_replace` layers are dense. Queries and keys are normalised where `use_qk_norm` says so. The
multi-token-prediction layer after the last decoder layer is not loaded here (see `model_runner.models.mtp`).

Source: GLM-4.5 (2025) and the `Glm4MoeForCausalLM` checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from model_runner.decoder.config import DecoderConfig, read_decoder, read_grouped_query
from model_runner.decoder.rope import read_rope
from model_runner.models.deepseek import read_shared_moe, read_sigmoid_router
from model_runner.models.mtp import LayersBehind
from model_runner.weights.hf_config import HFConfig


class Glm4MoeForCausalLM(LayersBehind):
    """The model. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        router = read_sigmoid_router(config, config.number("routed_scaling_factor", 1.0))
        first = config.integer("first_k_dense_replace", default=1, at_least=0)
        moe = read_shared_moe(config, range(first, config.integer("num_hidden_layers")), router)
        rope = read_rope(config, default_partial=0.5)
        attention = read_grouped_query(config)
        bias, norm = config.flag("attention_bias", False), config.flag("use_qk_norm", False)
        return read_decoder(
            config, generation, attention, rope=rope, moe=moe, default_eps=1e-5, qkv_bias=bias, qk_norm=norm
        )
