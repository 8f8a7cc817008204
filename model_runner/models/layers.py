"""Layers that model families share. Weights are loaded fused: one product where the checkpoint has several."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attention import AttentionPlan, AttentionShape
from model_runner.models.ops import normalise_and_rotate, silu_mul
from model_runner.models.rope import Rotation
from model_runner.tensor_parallel import WHOLE, Shard
from model_runner.weights import Checkpoint
from moe import linear
from ubatch import Point, dbo_yield

__all__ = ["Attention", "GatedMLP", "frozen"]


def frozen(weight: Tensor) -> nn.Parameter:
    """A weight that is served, not trained."""
    return nn.Parameter(weight, requires_grad=False)


class Attention(nn.Module):
    """Grouped-query attention with rotary embeddings and, in Qwen3's families, normalised queries and keys.

    Query, key and value projections are one product; query and key heads are normalised and rotated together.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        layer: int,
        hidden_size: int,
        shape: AttentionShape,
        *,
        bias: bool,
        norm_eps: float | None,
        shard: Shard = WHOLE,
    ) -> None:
        """Load the weights of this rank's heads.

        Args:
            checkpoint: where from.
            prefix: of the tensors' names, without the last dot.
            layer: whose KV cache.
            hidden_size: of the model.
            shape: heads of all ranks.
            bias: whether the projections have one.
            norm_eps: of the query and key norms; None for a family without them.
            shard: which heads are this rank's.
        """
        super().__init__()
        self.layer = layer
        self.norm_eps = norm_eps
        q_part = shard.part(shape.num_heads * shape.head_dim)
        kv_part = shard.part(shape.num_kv_heads * shape.head_dim, most=shape.num_kv_heads)
        parts = (("q", q_part), ("k", kv_part), ("v", kv_part))
        self.qkv = frozen(checkpoint.load_fused([(f"{prefix}.{p}_proj.weight", n) for p, n in parts], hidden_size))
        self.out = frozen(checkpoint.load(f"{prefix}.o_proj.weight", hidden_size, q_part))
        self.qkv_bias = self.out_bias = self.qk_norm = None
        if bias:
            self.qkv_bias = frozen(checkpoint.load_fused([(f"{prefix}.{p}_proj.bias", n) for p, n in parts]))
            if shard.rank == 0:  # the ranks' outputs are added up
                self.out_bias = frozen(checkpoint.load(f"{prefix}.o_proj.bias", hidden_size))
        self.shape = shape = shard.grouped(shape)
        if norm_eps is not None:
            norms = (("q", shape.num_heads), ("k", shape.num_kv_heads))
            weights = [
                checkpoint.load(f"{prefix}.{part}_norm.weight", shape.head_dim).expand(heads, -1)
                for part, heads in norms
            ]
            self.qk_norm = frozen(torch.cat(weights))

    def forward(self, x: Tensor, rotation: Rotation, plan: AttentionPlan) -> Tensor:
        """`x` `[T, hidden_size]`, normalised; the sum of the ranks' results is to be added to the residual."""
        shape = self.shape
        num_qk = shape.num_heads + shape.num_kv_heads
        heads = linear(x, self.qkv, self.qkv_bias).view(x.shape[0], num_qk + shape.num_kv_heads, shape.head_dim)
        qk, v = heads[:, :num_qk], heads[:, num_qk:]
        qk = normalise_and_rotate(qk, rotation, self.qk_norm, self.norm_eps)
        dbo_yield(Point.ATTN_PREPARE)
        out = plan.forward(qk[:, : shape.num_heads], qk[:, shape.num_heads :], v, self.layer)
        return linear(out.flatten(1), self.out, self.out_bias)


class GatedMLP(nn.Module):
    """A dense feed-forward layer, `down(silu(gate(x)) * up(x))`, or a rank's columns of it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        shard: Shard = WHOLE,
    ) -> None:
        super().__init__()
        columns = shard.part(intermediate_size)
        halves = [f"{prefix}.{part}_proj" for part in ("gate", "up")]
        self.gate_up = frozen(checkpoint.load_fused([(f"{name}.weight", columns) for name in halves], hidden_size))
        self.down = frozen(checkpoint.load(f"{prefix}.down_proj.weight", hidden_size, columns))
        self.gate_up_bias = self.down_bias = None
        if bias:
            self.gate_up_bias = frozen(checkpoint.load_fused([(f"{name}.bias", columns) for name in halves]))
            if shard.rank == 0:  # the ranks' outputs are added up
                self.down_bias = frozen(checkpoint.load(f"{prefix}.down_proj.bias", hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """`[T, hidden_size]` to the same; the ranks' results are to be summed."""
        return linear(silu_mul(linear(x, self.gate_up, self.gate_up_bias)), self.down, self.down_bias)
