"""Multi-head latent attention (MLA): keys and values live in the cache as one small latent per token.

    x -> q [-> norm -> q]        -> q_nope, q_rope     per head
    x -> latent -> norm, k_rope                        one for all heads; stored in the cache
    k_nope = latent @ w_uk^T, v = latent @ w_uv        computed by the back end, or w_uk and w_uv are absorbed instead

Source: DeepSeek-V2 (2024), section 2.1.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from attention import MLAInputs, MLAPlan, MLAShape, RopeTable
from model_runner.decoder.base import ExpertParallel
from model_runner.decoder.config import DecoderConfig
from model_runner.decoder.layers import Projection, frozen, load_projection
from model_runner.decoder.ops import rms_norm
from model_runner.weights.weights import Checkpoint
from ubatch import Point, dbo_yield

_LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of both latents: the published models do not take it from their config."""


class LatentAttention(nn.Module):
    """Latent attention with the projections of DeepSeek-V2 and V3.

    The two projections of the hidden state are fused into one product; `kv_b_proj` is stored as its two halves.
    """

    def __init__(
        self, shape: MLAShape, config: DecoderConfig, checkpoint: Checkpoint, layer: int, parallel: ExpertParallel
    ) -> None:
        """Load the weights: this rank's heads, and the whole projections to the latents.

        With biases, the compressing projections and the output projection have one. `shape` has the heads of all ranks.
        """
        super().__init__()
        self.layer, hidden_size, q_lora_rank = config.place(layer), config.hidden_size, config.q_lora_rank
        prefix, shard = f"{config.tensor_prefix}.layers.{layer}.self_attn", parallel.shard
        whole_heads, rank = shape.num_heads, shape.kv_lora_rank
        self.shape = shape = replace(shape, num_heads=whole_heads // shard.size)
        q_part = shard.part(whole_heads * shape.qk_head_dim)
        self.sizes = (q_part.size if q_lora_rank is None else q_lora_rank, rank, shape.qk_rope_head_dim)
        first = ("q_proj", q_part) if q_lora_rank is None else ("q_a_proj", q_lora_rank)
        v_part = shard.part(whole_heads * shape.v_head_dim)
        self.latent_norm = frozen(checkpoint.load(f"{prefix}.kv_a_layernorm.weight", rank))
        self.q_norm: nn.Parameter | None = None
        self.q_up: Projection | None = None
        if q_lora_rank is not None:
            self.q_norm = frozen(checkpoint.load(f"{prefix}.q_a_layernorm.weight", q_lora_rank))
            self.q_up = load_projection(checkpoint, [(f"{prefix}.q_b_proj.weight", q_part)], q_lora_rank)
        down_bias = out_bias = None
        if config.attention_bias:
            down_bias = torch.zeros(sum(self.sizes), dtype=checkpoint.dtype, device=checkpoint.device)
            of_q, of_kv = down_bias.split([self.sizes[0], sum(self.sizes[1:])])
            checkpoint.load_into(f"{prefix}.kv_a_proj_with_mqa.bias", of_kv)
            if q_lora_rank is not None:  # an uncompressed query has none
                checkpoint.load_into(f"{prefix}.q_a_proj.bias", of_q)
            if shard.rank == 0:  # the ranks' outputs are added up
                out_bias = checkpoint.load(f"{prefix}.o_proj.bias", hidden_size)
        parts = first, ("kv_a_proj_with_mqa", sum(self.sizes[1:]))
        down = [(f"{prefix}.{name}.weight", rows) for name, rows in parts]
        self.down = load_projection(checkpoint, down, hidden_size, down_bias)
        self.out = load_projection(checkpoint, [(f"{prefix}.o_proj.weight", hidden_size)], v_part, out_bias)

        up_part = shard.part(whole_heads * (shape.qk_nope_head_dim + shape.v_head_dim))
        with checkpoint.once_read(lambda: self._split_up(up)):
            up = checkpoint.load(f"{prefix}.kv_b_proj.weight", up_part, rank)

    def _split_up(self, up: Tensor) -> None:
        """Split `kv_b_proj` into `w_uk` and `w_uv`, in the layouts that the back ends need."""
        shape = self.shape
        heads = up.view(shape.num_heads, -1, shape.kv_lora_rank)
        keys, values = heads.split((shape.qk_nope_head_dim, shape.v_head_dim), dim=1)
        self.w_uk = frozen(keys.contiguous())
        self.w_uv = frozen(values.transpose(1, 2).contiguous())

    def forward(self, x: Tensor, rope: RopeTable, plan: MLAPlan) -> Tensor:
        """Attention of `x` `[T, hidden_size]` (normalised). The caller sums the ranks' results into the residual."""
        shape = self.shape
        q, latent, k_rope = self.down(x).split(self.sizes, dim=-1)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up(rms_norm(q, self.q_norm, _LATENT_NORM_EPS))
        heads = q.view(x.shape[0], shape.num_heads, shape.qk_head_dim)
        q_nope, q_rope = heads.split((shape.qk_nope_head_dim, shape.qk_rope_head_dim), dim=-1)
        latent = rms_norm(latent, self.latent_norm, _LATENT_NORM_EPS)
        dbo_yield(Point.ATTN_PREPARE)
        inputs = MLAInputs(q_nope, q_rope, latent, k_rope, self.w_uk, self.w_uv, rope)
        return self.out(plan.forward(inputs, self.layer).flatten(1))
