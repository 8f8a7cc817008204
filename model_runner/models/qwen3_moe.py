"""Qwen3-MoE: grouped-query attention with normalised queries and keys, and a softmax-routed MoE.

One layer, and the points it passes (those inside the MoE are in `moe.modular_kernel`):

    norm | qkv, q/k norm, rope  ATTN_PREPARE  core attention, out | + residual
    norm | router  SELECT  dispatch DISPATCH  experts  combine COMBINE  OUTPUT | + residual  LAYER

Layers named in `mlp_only_layers`, or skipped by `decoder_sparse_step`, have a dense MLP instead.

Source: Qwen3 Technical Report (2025) and the `Qwen3MoeForCausalLM` checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention import AttentionPlan, AttentionShape
from model_runner.hf_config import HFConfig
from model_runner.models.base import CausalLM, ExpertParallel, ModelConfig, current_plan
from model_runner.models.layers import Attention, GatedMLP, RotaryEmbedding, frozen, rms_norm
from model_runner.weights import Checkpoint
from moe import FusedMoEModularKernel, SoftmaxTopKRouter, make_experts, mask_padding
from ubatch import Point, dbo_yield

__all__ = ["Qwen3MoeConfig", "Qwen3MoeForCausalLM"]


@dataclass(frozen=True)
class Qwen3MoeConfig(ModelConfig):
    """Qwen3-MoE's own settings; names as in `config.json`."""

    intermediate_size: int
    moe_intermediate_size: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool
    tie_word_embeddings: bool

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has a MoE, not a dense MLP."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


class Qwen3MoeForCausalLM(CausalLM):
    """The model. See `CausalLM`."""

    config: Qwen3MoeConfig

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> Qwen3MoeConfig:
        """See `CausalLM.read_config`."""
        if config.flag("use_sliding_window", False):
            raise config.wrong("use_sliding_window", True, "false: sliding windows are not supported")
        activation = config.values.get("hidden_act", "silu")
        if activation != "silu":
            raise config.wrong("hidden_act", activation, "'silu'")
        hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        num_kv_heads = config.integer("num_key_value_heads")
        if num_heads % num_kv_heads:
            raise config.wrong("num_key_value_heads", num_kv_heads, f"a divisor of its {num_heads} attention heads")
        head_dim = config.integer("head_dim", default=hidden_size // num_heads)
        # transformers 5 writes the second name, everything before it the first.
        num_experts = config.integer("num_experts", "num_local_experts")
        top_k = config.integer("num_experts_per_tok")
        if top_k > num_experts:
            raise config.wrong("num_experts_per_tok", top_k, f"at most its {num_experts} experts")
        return Qwen3MoeConfig(
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden_size,
            num_layers=config.integer("num_hidden_layers"),
            attention=AttentionShape(num_heads, num_kv_heads, head_dim),
            max_position_embeddings=config.integer("max_position_embeddings"),
            num_experts=num_experts,
            eos_token_ids=generation.integers("eos_token_id") or config.integers("eos_token_id"),
            intermediate_size=config.integer("intermediate_size"),
            moe_intermediate_size=config.integer("moe_intermediate_size"),
            num_experts_per_tok=top_k,
            norm_topk_prob=config.flag("norm_topk_prob", False),
            decoder_sparse_step=config.integer("decoder_sparse_step", default=1),
            mlp_only_layers=config.integers("mlp_only_layers"),
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            rope_theta=config.rope_theta(),
            attention_bias=config.flag("attention_bias", False),
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
        )

    @classmethod
    def load(cls, config: Qwen3MoeConfig, checkpoint: Checkpoint, parallel: ExpertParallel) -> Qwen3MoeForCausalLM:
        """See `CausalLM.load`."""
        return cls(config, checkpoint, parallel)

    def __init__(self, config: Qwen3MoeConfig, checkpoint: Checkpoint, parallel: ExpertParallel) -> None:
        super().__init__()
        self.config = config
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embed_tokens = frozen(checkpoint.load("model.embed_tokens.weight", *vocabulary))
        self.rope = RotaryEmbedding(config.attention.head_dim, config.rope_theta, checkpoint.device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, checkpoint, parallel, layer) for layer in range(config.num_layers)
        )
        self.norm = frozen(checkpoint.load("model.norm.weight", config.hidden_size))
        tied = config.tie_word_embeddings
        self.lm_head = self.embed_tokens if tied else frozen(checkpoint.load("lm_head.weight", *vocabulary))

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See `CausalLM.forward`."""
        plan, num_tokens = current_plan()
        hidden = F.embedding(input_ids, self.embed_tokens)
        cos, sin = self.rope(positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, plan, num_tokens)
            dbo_yield(Point.LAYER)
        return rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """See `CausalLM.compute_logits`."""
        return F.linear(hidden_states, self.lm_head)


class DecoderLayer(nn.Module):
    """Attention and a (dense or sparse) MLP, each behind a norm and added to the residual."""

    def __init__(self, config: Qwen3MoeConfig, checkpoint: Checkpoint, parallel: ExpertParallel, layer: int) -> None:
        super().__init__()
        prefix, hidden_size = f"model.layers.{layer}", config.hidden_size
        self.eps = config.rms_norm_eps
        self.input_norm = frozen(checkpoint.load(f"{prefix}.input_layernorm.weight", hidden_size))
        self.attention = Attention(
            checkpoint,
            f"{prefix}.self_attn",
            layer,
            hidden_size,
            config.attention,
            bias=config.attention_bias,
            norm_eps=config.rms_norm_eps,
        )
        self.post_attention_norm = frozen(checkpoint.load(f"{prefix}.post_attention_layernorm.weight", hidden_size))
        self.mlp: GatedMLP | SparseMLP
        if config.is_sparse(layer):
            self.mlp = SparseMLP(config, checkpoint, parallel, f"{prefix}.mlp")
        else:
            self.mlp = GatedMLP(checkpoint, f"{prefix}.mlp", hidden_size, config.intermediate_size)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, num_tokens: int) -> Tensor:
        """`[T, hidden_size]` to the same; the first `num_tokens` rows are tokens, the rest is padding."""
        hidden = hidden + self.attention(rms_norm(hidden, self.input_norm, self.eps), cos, sin, plan)
        x = rms_norm(hidden, self.post_attention_norm, self.eps)
        return hidden + (self.mlp(x, num_tokens) if isinstance(self.mlp, SparseMLP) else self.mlp(x))


class SparseMLP(nn.Module):
    """Router and experts; this rank holds the experts that the transport says."""

    def __init__(self, config: Qwen3MoeConfig, checkpoint: Checkpoint, parallel: ExpertParallel, prefix: str) -> None:
        super().__init__()
        self.gate = frozen(checkpoint.load(f"{prefix}.gate.weight", config.num_experts, config.hidden_size))
        self.router = SoftmaxTopKRouter(config.num_experts_per_tok, renormalize=config.norm_topk_prob)
        held = parallel.all2all.experts
        w13, w2 = _load_experts(checkpoint, prefix, held, config.hidden_size, config.moe_intermediate_size)
        self.kernel = FusedMoEModularKernel(parallel.all2all, make_experts(parallel.experts, w13, w2, held.start))

    def forward(self, x: Tensor, num_tokens: int) -> Tensor:
        """`[T, hidden_size]` to the same; padding behind `num_tokens` visits no expert."""
        topk_weights, topk_ids = self.router(F.linear(x, self.gate))
        out: Tensor = self.kernel(x, topk_weights, mask_padding(topk_ids, num_tokens))
        return out


def _load_experts(
    checkpoint: Checkpoint, prefix: str, held: range, hidden_size: int, intermediate_size: int
) -> tuple[Tensor, Tensor]:
    """`w13` `[experts held, 2 * intermediate, hidden]`, gate first, and `w2` `[experts held, hidden, intermediate]`."""
    dtype, device = checkpoint.dtype, checkpoint.device
    w13 = torch.empty(len(held), 2 * intermediate_size, hidden_size, dtype=dtype, device=device)
    w2 = torch.empty(len(held), hidden_size, intermediate_size, dtype=dtype, device=device)
    for slot, expert in enumerate(held):
        checkpoint.load_into(f"{prefix}.experts.{expert}.gate_proj.weight", w13[slot, :intermediate_size])
        checkpoint.load_into(f"{prefix}.experts.{expert}.up_proj.weight", w13[slot, intermediate_size:])
        checkpoint.load_into(f"{prefix}.experts.{expert}.down_proj.weight", w2[slot])
    return w13, w2
