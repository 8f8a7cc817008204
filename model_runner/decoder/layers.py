"""Layers that model families share. Weights are loaded fused: one product where the checkpoint has several.

A `Projection`, also a gate or the output layer, may be packed for the CPU: its weight is then kept only in the layout
of the `native` experts (`moe.NativeLinear`). The plain weight is freed, so a packed layer cannot be saved, or moved to
another device.

Linear attention with the gated delta rule (`GatedDeltaNet`) has a recurrent state per request, no keys and values:

    projections    queries, keys, values | z | b | a      one product
    convolution    of queries, keys and values over a request's last tokens, SiLU
    delta rule     decay exp(-exp(A_log) softplus(a + dt_bias)), strength of writing sigmoid(b)
    output         norm of each head, times silu(z); projection

Convolution and delta rule belong to the step's plan, which knows every request's state (`attention.linear`).

Source of it: Yang et al., Gated Delta Networks, 2024; the `Qwen3NextForCausalLM` checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention import AttentionPlan, AttentionShape, GatedDeltaShape, HybridPlan
from model_runner.decoder.base import ExpertParallel
from model_runner.decoder.config import DecoderConfig
from model_runner.decoder.ops import normalise_and_rotate, rms_norm, sigmoid_mul, silu_mul
from model_runner.decoder.rope import Rotation
from model_runner.parallel.tensor_parallel import WHOLE, Shard, TensorParallel
from model_runner.weights.fp8 import load_fp8_projection
from model_runner.weights.weights import Checkpoint, Part, Size
from moe import NativeLinear, fp8_linear, linear
from ubatch import ConfigError, Point, dbo_yield
from ubatch.kernels import add_bias
from ubatch.schedules import LINEAR_ATTENTION


def frozen(weight: Tensor) -> nn.Parameter:
    """A weight that is served, not trained."""
    return nn.Parameter(weight, requires_grad=False)


def load_norm(checkpoint: Checkpoint, name: str, size: int, *, zero_centred: bool) -> nn.Parameter:
    """The weights of a norm. Zero-centred ones are 1 + what is stored, in float32: sums near 1 would lose digits."""
    if not zero_centred:
        return frozen(checkpoint.load(name, size))
    weight = torch.empty(size, dtype=torch.float32, device=checkpoint.device)
    with checkpoint.once_read(lambda: weight.add_(1)):
        checkpoint.load_into(name, weight)
    return frozen(weight)


class Projection(nn.Module):
    """`x @ weight^T + bias`; also an embedding, whose rows are looked up.

    Args:
        weight: `[out, in]`.
        bias: `[out]`, or None.
        scales: of a weight in fp8, see `moe.fp8_linear`: such a projection stays in fp8, and rounds `x` to it. None
            for other dtypes.
    """

    scales: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None) -> None:
        super().__init__()
        self.num_weights = weight.numel()
        self.register_buffer("scales", scales)
        self.weight: nn.Parameter | None = frozen(weight)
        self.bias = None if bias is None else frozen(bias)
        self._packed: NativeLinear | None = None

    def pack(self) -> None:
        """Replace the weight by its packed form; a second call does nothing."""
        if self.weight is not None:
            self._packed = NativeLinear(self.weight)
            self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`; raises the errors of `NativeLinear` if packed, of `moe.fp8_linear` in fp8."""
        packed, bias = self._packed, self.bias
        if packed is not None:
            return packed(x) if bias is None else add_bias(packed.sums(x), bias)
        if self.weight is None:
            raise ConfigError("this projection has no weight: it was neither loaded nor packed.")
        return linear(x, self.weight, bias) if self.scales is None else fp8_linear(x, self.weight, self.scales, bias)

    def scores(self, x: Tensor) -> Tensor:
        """The same for logits: if packed, they are float32 and not rounded."""
        return self(x) if self._packed is None or self.bias is not None else self._packed.sums(x)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows `indices` `[N]` of the weight, `[N, in]`: an embedding."""
        if self.scales is not None:
            raise ConfigError("a projection in fp8 is no embedding; load the embedding's weight by `Checkpoint.load`.")
        if self._packed is not None:
            return self._packed.weight_rows(indices)
        if self.weight is None:
            raise ConfigError("this projection has no weight: it was neither loaded nor packed.")
        return F.embedding(indices, self.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Called by `to`, `cuda`, `half` and the like."""
        if self._packed is not None:
            moved = fn(torch.empty(0, dtype=self._packed.dtype, device="cpu"))
            if moved.dtype is not self._packed.dtype or moved.device.type != "cpu":
                raise ConfigError(
                    f"packed weights are {self._packed.dtype} on the CPU for good and cannot become {moved.dtype} on "
                    f"{moved.device}. Use experts_backend='grouped', which packs nothing."
                )
        if self.scales is None:
            return super()._apply(fn, recurse)
        in_fp8 = (self.weight, self.scales)

        def keep_dtype(tensor: Tensor) -> Tensor:  # results have the dtype of x
            moved = fn(tensor)
            fixed = moved.dtype is not tensor.dtype and any(tensor is each for each in in_fp8)
            return tensor.to(moved.device) if fixed else moved

        return super()._apply(keep_dtype, recurse)

    def __deepcopy__(self, memo: dict[int, object]) -> Projection:
        if self._packed is not None:
            raise ConfigError("packed weights cannot be copied. Use experts_backend='grouped', which packs nothing.")
        copied = Projection.__new__(Projection)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def load_projection(
    checkpoint: Checkpoint, tensors: Sequence[tuple[str, Size]], columns: Size, bias: Tensor | None = None
) -> Projection:
    """A projection of one or several fused weights; it stays in fp8 if all of them can (`load_fp8_projection`).

    Args:
        tensors: (name, rows) of the weights, in order; all rows, or a part.
        columns: their columns; all, or a part.
        bias: of all of them together.
    """
    in_fp8 = load_fp8_projection(checkpoint, tensors, columns)
    if in_fp8 is None:
        return Projection(checkpoint.load_fused(tensors, columns), bias)
    weight, scales = in_fp8
    return Projection(weight, bias, scales)


def pack_projections(model: nn.Module, experts: str = "native") -> None:
    """Pack every `Projection` of a model whose experts are `native`, one after the other; raises the errors of
    `Projection.pack`."""
    for module in model.modules():
        if experts == "native" and isinstance(module, Projection):
            module.pack()


class Attention(nn.Module):
    """Grouped-query attention with rotary embeddings and, in Qwen3's and other families, normalised queries and keys.

    Query, key and value projections are fused into one product, in which the gates of the output are last, if the
    family has them: in the checkpoint each head's is behind its query, and value heads have the size of the others.
    Query and key heads are normalised and rotated together.
    """

    def __init__(
        self, shape: AttentionShape, config: DecoderConfig, checkpoint: Checkpoint, layer: int, parallel: ExpertParallel
    ) -> None:
        """Load the weights of this rank's heads; `shape` has the layer's heads of all ranks."""
        super().__init__()
        prefix, shard = f"{config.tensor_prefix}.layers.{layer}.self_attn", parallel.shard
        self.layer, self.eps, self.gated = config.place(layer), config.rms_norm_eps, config.output_gate
        self.zero_centred, self.clip, self.tensor = config.zero_centred_norms, config.clip_qkv, parallel.tensor
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        heads_part, q_part, out_part = map(shard.part, (heads, heads * shape.head_dim, heads * shape.value_dim))
        k_part, v_part = (shard.part(kv_heads * dim, most=kv_heads) for dim in (shape.head_dim, shape.value_dim))
        self.shape = shard.grouped(shape)
        num_qk, kv_heads = self.shape.num_heads + self.shape.num_kv_heads, self.shape.num_kv_heads
        self._sizes = [num_qk * shape.head_dim, kv_heads * shape.value_dim, out_part.size if self.gated else 0]
        parts = (("q", shard.part(2 * q_part.total) if self.gated else q_part), ("k", k_part), ("v", v_part))
        weights = [(f"{prefix}.{p}_proj.weight", n) for p, n in parts]
        of_qkv = None
        with checkpoint.once_read(lambda: self._move_gates(self.qkv.weight, of_qkv)):
            if config.attention_bias or config.qkv_bias:
                of_qkv = checkpoint.load_fused([(f"{prefix}.{p}_proj.bias", n) for p, n in parts])
            if self.gated:  # rows are moved; those of scales in fp8 could not be
                self.qkv = Projection(checkpoint.load_fused(weights, config.hidden_size), of_qkv)
            else:
                self.qkv = load_projection(checkpoint, weights, config.hidden_size, of_qkv)
        of_out = None
        if config.attention_bias and shard.rank == 0:  # the ranks' outputs are added up
            of_out = checkpoint.load(f"{prefix}.o_proj.bias", config.hidden_size)
        with checkpoint.once_read(lambda: self._scale_values(config.value_scale)):
            of_o = [(f"{prefix}.o_proj.weight", config.hidden_size)]
            self.out = load_projection(checkpoint, of_o, out_part, of_out)
        self.sinks: nn.Parameter | None = None
        if shape.sinks:
            with checkpoint.once_read(lambda: self._keep_sinks(sinks)):
                sinks = checkpoint.load(f"{prefix}.{config.sinks_name}", heads_part)
        self.qk_norm: nn.Parameter | None = None
        if config.qk_norm or config.norms_all_heads:
            self._load_norms(checkpoint, prefix, q_part, k_part)

    def _scale_values(self, factor: float) -> None:
        """Attention's output is linear in the values, so a factor on them is one on the next projection's weights."""
        scaled = self.out.weight if self.out.scales is None else self.out.scales
        if factor != 1.0 and scaled is not None:
            scaled *= factor

    def _keep_sinks(self, sinks: Tensor) -> None:
        """Store the sinks in float32, in which back ends compute: steps that convert them could not be recorded."""
        self.sinks = frozen(sinks.float())

    def _load_norms(self, checkpoint: Checkpoint, prefix: str, q_part: Size, k_part: Size) -> None:
        names, size = (f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight"), self.shape.head_dim
        with checkpoint.once_read(lambda: self._repeat_norms(norms)):
            norms = [load_norm(checkpoint, name, size, zero_centred=self.zero_centred) for name in names]

    def _move_gates(self, *fused: Tensor | None) -> None:
        """Move the gates' rows behind those of queries, keys and values."""
        queries = 2 * self.shape.num_heads * self.shape.head_dim
        for rows in (each for each in fused if self.gated and each is not None):
            both = rows[:queries].view(self.shape.num_heads, 2, self.shape.head_dim, *rows.shape[1:])
            rows.copy_(torch.cat((both[:, 0].flatten(0, 1), rows[queries:], both[:, 1].flatten(0, 1))))

    def _repeat_norms(self, norms: Sequence[Tensor]) -> None:
        """Store the norms' weights as one row for each query head, then one for each key head."""
        heads = (self.shape.num_heads, self.shape.num_kv_heads)
        rows = [norm.expand(number, -1) for norm, number in zip(norms, heads, strict=True)]
        self.qk_norm = frozen(torch.cat(rows))

    def forward(self, x: Tensor, rotation: Rotation, plan: AttentionPlan) -> Tensor:
        """Attention of `x` `[T, hidden_size]` (normalised). The caller sums the ranks' results into the residual."""
        q, k, v, gate = self._heads(x, rotation)
        dbo_yield(Point.ATTN_PREPARE)
        out = plan.forward(q, k, v, self.layer, self.sinks).flatten(1)
        return self.out(out if gate is None else sigmoid_mul(gate, out))

    def _heads(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values, each `[T, heads, size]`, as the back end takes them, and the output's gate."""
        shape, rows = self.shape, x.shape[0]
        qk, v, gate = self.qkv(x).split(self._sizes, dim=-1)
        qk = qk.view(rows, shape.num_heads + shape.num_kv_heads, shape.head_dim)
        qk = normalise_and_rotate(qk, rotation, self.qk_norm, None if self.qk_norm is None else self.eps)
        v = v.view(rows, shape.num_kv_heads, shape.value_dim)
        return qk[:, : shape.num_heads], qk[:, shape.num_heads :], v, gate if self.gated else None


class AllHeadsNormAttention(Attention):
    """Attention that normalises a token's queries over all heads together, and its keys, as OLMoE does; then it clips
    queries, keys and values, if the config says so."""

    def _load_norms(self, checkpoint: Checkpoint, prefix: str, q_part: Size, k_part: Size) -> None:
        self.q_norm = frozen(checkpoint.load(f"{prefix}.q_norm.weight", q_part))
        self.k_norm = frozen(checkpoint.load(f"{prefix}.k_norm.weight", k_part))

    def _heads(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q, k, v = self.qkv(x).split((len(self.q_norm), len(self.k_norm), len(self.k_norm)), dim=-1)
        if self.tensor is None:
            q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
        else:
            q, k = self._normalise(q, k, self.tensor)
        if self.clip is not None:
            q, k, v = (each.clamp(-self.clip, self.clip) for each in (q, k, v))
        q, k, v = (each.unflatten(-1, (-1, self.shape.head_dim)) for each in (q, k, v))
        return normalise_and_rotate(q, rotation, None, None), normalise_and_rotate(k, rotation, None, None), v, None

    def _normalise(self, q: Tensor, k: Tensor, tensor: TensorParallel) -> tuple[Tensor, Tensor]:
        """Normalise by the mean square over all ranks: the mean of theirs, as all have as many heads of each kind."""
        squares = torch.stack([heads.float().square().mean(-1) for heads in (q, k)], dim=-1)
        scales = (tensor.mean(squares, Point.QK_GATHER) + self.eps).rsqrt()
        normalised = [
            (heads * scale[:, None] * weight).to(heads.dtype)  # float32 until it is rounded
            for heads, scale, weight in zip((q, k), scales.unbind(-1), (self.q_norm, self.k_norm), strict=True)
        ]
        return normalised[0], normalised[1]


class GatedMLP(nn.Module):
    """A dense feed-forward layer, `down(silu(gate(x)) * up(x))`, or one rank's share of its intermediate columns.

    Shared experts may have a gate on their result, `sigmoid(gate(x)) * mlp(x)`. Source of that: Qwen1.5-MoE (2024).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        fused: tuple[str, str] | None = None,
        gate: str | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        """Load the weights. If gate and up are one projection, `fused` is `(gate and up, down)`: not with a shard.
        `gate` is the name of the result's gate, without `.weight`; None for none."""
        super().__init__()
        columns = shard.part(intermediate_size)
        halves = [f"{prefix}.{part}_proj" for part in ("gate", "up")]
        gate_up_bias = down_bias = None
        if bias:
            gate_up_bias = checkpoint.load_fused([(f"{name}.bias", columns) for name in halves])
            if shard.rank == 0:  # the ranks' outputs are added up
                down_bias = checkpoint.load(f"{prefix}.down_proj.bias", hidden_size)
        gate_up: list[tuple[str, Size]] = [(f"{name}.weight", columns) for name in halves]
        down = "down_proj"
        if fused is not None:
            gate_up, down = [(f"{prefix}.{fused[0]}.weight", 2 * intermediate_size)], fused[1]
        self.gate_up = load_projection(checkpoint, gate_up, hidden_size, gate_up_bias)
        self.down = load_projection(checkpoint, [(f"{prefix}.{down}.weight", hidden_size)], columns, down_bias)
        self.gate = None if gate is None else Projection(checkpoint.load(f"{gate}.weight", 1, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """`[T, hidden_size]` to the same shape; the caller sums the ranks' results."""
        out = self.down(silu_mul(self.gate_up(x)))
        return out if self.gate is None else sigmoid_mul(self.gate(x), out)


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
