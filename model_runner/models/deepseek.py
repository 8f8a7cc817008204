"""DeepSeek-V2: latent attention, and a MoE with shared experts whose router prefers groups of experts.

The first `first_k_dense_replace` layers are dense. V2-Lite does not compress its queries and does not limit groups.

DeepSeek-V3 (and R1): DeepSeek-V2 with a sigmoid router whose bias balances the experts' load.

GLM-4.5: attention that rotates half of every head, and DeepSeek-V3's router with shared experts. The first
`first_k_dense_replace` layers are dense. Queries and keys are normalised where `use_qk_norm` says so.

The multi-token-prediction layer after V3's and GLM's last decoder layer is not loaded here (see
`model_runner.models.draft_heads`).

Source: DeepSeek-V2, DeepSeek-V3 (2024), GLM-4.5 (2025) and the `DeepseekV2ForCausalLM`, `DeepseekV3ForCausalLM` and
`Glm4MoeForCausalLM` checkpoints on the Hugging Face hub.
"""

from collections.abc import Iterable
from typing import Any

from attention import MLAShape
from model_runner.decoder import DecoderConfig
from model_runner.decoder.config import MoEConfig, read_decoder, read_grouped_query, read_num_experts, read_top_k
from model_runner.decoder.decoder import DecoderLM
from model_runner.decoder.rope import Rope, read_rope
from model_runner.models.draft_heads import LayersBehind
from model_runner.weights.files import HFConfig
from moe import GroupLimitedRouter, Router, SigmoidTopKRouter


class DeepseekV2ForCausalLM(DecoderLM):
    """DeepSeek-V2. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        method = config.values.get("topk_method") or "greedy"
        scoring = config.values.get("scoring_func", "softmax")
        if scoring != "softmax":
            raise config.wrong("scoring_func", scoring, "'softmax'")
        if method not in ("greedy", "group_limited_greedy"):
            raise config.wrong("topk_method", method, "'greedy' or 'group_limited_greedy'")
        # With norm_topk_prob the published code drops the scaling factor, others keep it.
        for name in ("norm_topk_prob", "mlp_bias"):
            if config.flag(name, False):
                raise config.wrong(name, True, "false, as in all published checkpoints")
        num_groups, top_groups = (1, 1) if method == "greedy" else read_groups(config)
        scale = config.number("routed_scaling_factor")
        router = GroupLimitedRouter(read_top_k(config), num_groups, top_groups, scale=scale)
        return read_deepseek(config, generation, router)


def read_deepseek(config: HFConfig, generation: HFConfig, router: Router, **differences: Any) -> DecoderConfig:
    """Read the config entries that DeepSeek-V2 and V3 share: all except the router's."""
    rope = read_rope(config)
    first, every = config.integer("first_k_dense_replace", at_least=0), config.integer("moe_layer_freq", default=1)
    layers = range(first, config.integer("num_hidden_layers"))
    moe = read_shared_moe(config, [layer for layer in layers if layer % every == 0], router)
    attention, differences["q_lora_rank"] = _read_latent(config, rope), config.optional_integer("q_lora_rank")
    return read_decoder(config, generation, attention, rope=rope, moe=moe, flags=("attention_bias",), **differences)


def read_shared_moe(config: HFConfig, layers: Iterable[int], router: Router) -> MoEConfig:
    """The MoE of some layers, with shared experts, each of the size of a routed one."""
    size = config.integer("moe_intermediate_size")
    shared = config.integer("n_shared_experts", at_least=0) * size
    return MoEConfig(frozenset(layers), size, router, shared, float32_gate=True)


def read_groups(config: HFConfig) -> tuple[int, int]:
    """Number of groups that the experts form, and number of groups that a token may visit.

    Raises:
        CheckpointError: an entry is missing, or does not fit the number of experts.
    """
    num_experts, top_k = read_num_experts(config), read_top_k(config)
    num_groups, top_groups = config.integer("n_group"), config.integer("topk_group")
    if num_experts % num_groups:
        raise config.wrong("n_group", num_groups, f"a divisor of its {num_experts} experts")
    if top_groups > num_groups or top_k > num_experts // num_groups * top_groups:
        raise config.wrong(
            "topk_group", top_groups, f"at most its {num_groups} groups, and enough for {top_k} experts per token"
        )
    return num_groups, top_groups


def _read_latent(config: HFConfig, rope: Rope) -> MLAShape:
    """Sizes of heads and latent; the softmax scale includes YaRN's factor for longer contexts."""
    names = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    heads, rank, nope, rotated, values = map(config.integer, names)
    if rotated % 2:
        raise config.wrong("qk_rope_head_dim", rotated, "an even number, for rotary embeddings")
    return MLAShape(heads, rank, nope, rotated, values, scale=(nope + rotated) ** -0.5 * rope.softmax_factor)


class DeepseekV3ForCausalLM(LayersBehind):
    """DeepSeek-V3. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        for name, known in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
            if config.values.get(name, known) != known:
                raise config.wrong(name, config.values[name], repr(known))
        router = read_sigmoid_router(config, config.number("routed_scaling_factor"))
        return read_deepseek(config, generation, router, rope_interleaved=config.flag("rope_interleave", True))


def read_sigmoid_router(config: HFConfig, scale: float) -> SigmoidTopKRouter:
    """The router of a family, whose weights are multiplied by `scale`; errors as `read_groups`."""
    renormalize = config.flag("norm_topk_prob", True)
    return SigmoidTopKRouter(read_top_k(config), *read_groups(config), renormalize=renormalize, scale=scale)


class Glm4MoeForCausalLM(LayersBehind):
    """GLM-4.5. See `CausalLM`."""

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
