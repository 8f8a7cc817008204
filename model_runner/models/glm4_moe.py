"""GLM-4.5: attention that rotates half of every head, and DeepSeek-V3's router with shared experts.

The first `first_k_dense_replace` layers are dense. Queries and keys are normalised where `use_qk_norm` says so. The
multi-token-prediction layer after the last decoder layer is not loaded here (see `model_runner.models.mtp`).

Source: GLM-4.5 (2025) and the `Glm4MoeForCausalLM` checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from model_runner.decoder.config import DecoderConfig, MoEConfig, read_decoder, read_grouped_query, read_top_k
from model_runner.decoder.decoder import DecoderLM
from model_runner.decoder.rope import read_rope
from model_runner.models.deepseek_v2 import read_groups
from model_runner.models.mtp import left_behind
from model_runner.weights.hf_config import HFConfig
from model_runner.weights.weights import Checkpoint
from moe import SigmoidTopKRouter

__all__ = ["Glm4MoeForCausalLM"]


class Glm4MoeForCausalLM(DecoderLM):
    """The model. See `CausalLM`."""

    @classmethod
    def left(cls, config: DecoderConfig, checkpoint: Checkpoint) -> Mapping[str, str]:
        """See `CausalLM.left`."""
        return left_behind(config, checkpoint)

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        num_groups, top_groups = read_groups(config)
        router = SigmoidTopKRouter(
            read_top_k(config),
            num_groups,
            top_groups,
            renormalize=config.flag("norm_topk_prob", True),
            scale=config.number("routed_scaling_factor", 1.0),
        )
        intermediate_size = config.integer("moe_intermediate_size")
        first = config.integer("first_k_dense_replace", default=1, at_least=0)
        moe = MoEConfig(
            layers=frozenset(range(first, config.integer("num_hidden_layers"))),
            intermediate_size=intermediate_size,
            router=router,
            shared_intermediate_size=config.integer("n_shared_experts", at_least=0) * intermediate_size,
            float32_gate=True,
        )
        rope = read_rope(config, default_partial=0.5)
        attention = read_grouped_query(config)
        return replace(
            read_decoder(config, generation, attention, rope=rope, moe=moe, default_eps=1e-5),
            qkv_bias=config.flag("attention_bias", False),
            qk_norm=config.flag("use_qk_norm", False),
        )
