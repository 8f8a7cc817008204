"""Linear attention with the gated delta rule: a recurrent state per request instead of keys and values.

    projections    queries, keys, values | z | b | a      one product
    convolution    of queries, keys and values over a request's last tokens, SiLU
    delta rule     decay exp(-exp(A_log) softplus(a + dt_bias)), strength of writing sigmoid(b)
    output         norm of each head, times silu(z); projection

Convolution and delta rule belong to the step's plan, which knows every request's state (`attention.linear`).

Source: Yang et al., Gated Delta Networks, 2024; the `Qwen3NextForCausalLM` checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention import GatedDeltaShape, HybridPlan
from model_runner.decoder.base import ExpertParallel
from model_runner.decoder.config import DecoderConfig
from model_runner.decoder.layers import Projection, frozen
from model_runner.weights.weights import Checkpoint, Part
from ubatch import ConfigError, Point, dbo_yield
from ubatch.schedules import LINEAR_ATTENTION


class GatedDeltaNet(nn.Module):
    """A layer with the gated delta rule. Each tensor-parallel rank has its share of the heads."""

    def __init__(
        self, full: GatedDeltaShape, config: DecoderConfig, checkpoint: Checkpoint, layer: int, parallel: ExpertParallel
    ) -> None:
        """Load the weights of this rank's heads; `full` has the heads of all ranks."""
        super().__init__()
        prefix, shard = f"{config.tensor_prefix}.layers.{layer}.linear_attn", parallel.shard
        self.place, self.norm_eps = config.place(layer), config.rms_norm_eps
        self.shape = own = shard.linear(full)
        grouped, hidden_size = config.linear_grouped, config.hidden_size
        device = checkpoint.device
        of_keys, of_values, of_heads = map(shard.part, (full.key_size, full.value_size, full.num_v_heads))
        mixed = [of_keys, _behind(of_keys, full.key_size), _behind(of_values, 2 * full.key_size)]
        mixed = [Part(part.start, part.size, full.conv_dim) for part in mixed]
        if grouped:
            both = shard.part(2 * (full.key_size + full.value_size)), shard.part(2 * full.num_v_heads)
            names = [(f"{prefix}.in_proj_{name}.weight", part) for name, part in zip(("qkvz", "ba"), both, strict=True)]
        else:
            names = [(f"{prefix}.in_proj_qkv.weight", part) for part in mixed]
            others = ("z", of_values), ("b", of_heads), ("a", of_heads)
            names += [(f"{prefix}.in_proj_{name}.weight", part) for name, part in others]
        with checkpoint.once_read(lambda: _by_kind(inputs, own) if grouped else None):
            inputs = checkpoint.load_fused(names, hidden_size)
        self.inputs = Projection(inputs)
        self.out = Projection(checkpoint.load(f"{prefix}.out_proj.weight", hidden_size, of_values))

        # Small, and read in every step: float32, as they are computed with.
        self.conv = frozen(torch.empty(full.conv_kernel, own.conv_dim, device=device))
        self.rate, self.dt_bias = (frozen(torch.empty(own.num_v_heads, device=device)) for _ in range(2))
        self.norm = frozen(torch.empty(full.v_dim, device=device))
        checkpoint.load_into(f"{prefix}.norm.weight", self.norm)
        with checkpoint.once_read(lambda: self._place_small(conv, log_rate, bias, of_heads)):
            conv = checkpoint.load_fused([(f"{prefix}.conv1d.weight", part) for part in mixed], 1, len(self.conv))
            log_rate, bias = (torch.empty(full.num_v_heads, device=device) for _ in range(2))
            checkpoint.load_into(f"{prefix}.A_log", log_rate)
            checkpoint.load_into(f"{prefix}.dt_bias", bias)

    def _place_small(self, conv: Tensor, log_rate: Tensor, bias: Tensor, heads: Part) -> None:
        self.conv.copy_(conv[:, 0].T)
        self.rate.copy_(-log_rate[heads.slice].exp())
        self.dt_bias.copy_(bias[heads.slice])

    def forward(self, x: Tensor, rotation: object, plan: object) -> Tensor:
        """Linear attention of `x` `[T, hidden_size]` (normalised). The caller sums the ranks' results.

        Raises:
            ConfigError: the step's plan has no part for linear attention.
        """
        if not isinstance(plan, HybridPlan):
            raise ConfigError("a model with linear attention was called without states: give UBatchAttention `states`.")
        shape = self.shape
        sizes = (shape.conv_dim, shape.value_size, shape.num_v_heads, shape.num_v_heads)
        qkv, z, b, a = self.inputs(x).split(sizes, dim=-1)
        decay, strength = plan.linear.gates(a, b, self.rate, self.dt_bias)
        dbo_yield(Point.ATTN_PREPARE, LINEAR_ATTENTION)
        out = plan.linear.forward(qkv, decay, strength, self.conv, self.place)
        out = F.rms_norm(out, (shape.v_dim,), self.norm, self.norm_eps) * F.silu(z.float()).view_as(out)
        return self.out(out.flatten(1).to(x.dtype))


def _behind(part: Part, start: int) -> Part:
    return Part(start + part.start, part.size, part.total)


def _by_kind(weight: Tensor, shape: GatedDeltaShape) -> None:
    """Reorder rows from `q k v z` of each key head, then `b a` of each, to all queries, all keys, and so on."""
    heads, values = shape.num_k_heads, shape.value_size // shape.num_k_heads
    sums = 2 * (shape.key_size + shape.value_size)
    gates = shape.num_v_heads // heads
    first = weight[:sums].view(heads, -1, weight.shape[1]).split((shape.k_dim, shape.k_dim, values, values), dim=1)
    second = weight[sums:].view(heads, -1, weight.shape[1]).split((gates, gates), dim=1)
    weight.copy_(torch.cat([part.flatten(0, 1) for part in (*first, *second)]))
