"""The one interface of all attention back ends.

    backend = make_attention_backend("torch", shape, kv_cache)      once (and once per lane; see `attention.lanes`)
    plan = backend.plan(metadata)                                   once per step
    out = plan.forward(q, k, v, layer)                              once per layer

For CUDA graphs, whose kernels read fixed addresses:

    backend.init_graph_buffers(limits)                              once, before the first capture
    plan = backend.plan_for_graph(metadata)                         once per captured size; scalars at their worst case
    backend.replan(plan, metadata)                                  before each replay, in place

A back end object serves one lane and has its own workspace and graph buffers, because the kernels of two lanes may run
at once and keep counters in the workspace. Everything that belongs to one step lives in the plan, which the lane's
forward context carries.

Multi-head (and grouped-query) attention and multi-head latent attention (MLA) have different inputs. So a plan for an
`AttentionShape` has the `forward` of `AttentionPlan`, and a plan for an `MLAShape` has the `forward` of `MLAPlan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from attention.kv_cache import KVCacheSpec, LayersCacheSpec, MLACacheSpec, check_positive
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError


@dataclass(frozen=True)
class AttentionShape:
    """The shape of a causal attention layer on this rank.

    Attributes:
        num_heads: query heads; a multiple of `num_kv_heads`.
        num_kv_heads: key/value heads.
        head_dim: elements per query and key head.
        scale: factor on the scores; None is `head_dim ** -0.5`.
        sliding_window: how many tokens a query sees, itself included; None is all of them.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`, after scaling; None is no cap.
        sinks: each head has one more term in its softmax's denominator, given to `forward`.
        v_head_dim: elements per value head, and per head of the result; None is `head_dim`.
        layers: the shape of every layer, if they differ (`of_layers`). The other attributes are then those of the first
            layer, without a window.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    v_head_dim: int | None = None
    layers: tuple[AttentionShape, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_positive("attention", self, "num_heads", "num_kv_heads", "head_dim", "v_head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"attention: {self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly."
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"attention: sliding_window must be at least 1 or None, not {self.sliding_window}.")
        if self.layers is not None and self.sliding_window is not None:
            raise ConfigError("attention: give either sliding_window, or the shapes of all layers; not both.")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ConfigError(f"attention: soft_cap must be positive or None, not {self.soft_cap}.")

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores that is in force."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @classmethod
    def of_layers(cls, layers: Sequence[AttentionShape]) -> AttentionShape:
        """The shape of a model whose layers with attention have these shapes, at least one. Only if they differ it has
        `layers`, and the cache must have as many."""
        if len(set(layers)) == 1:
            return layers[0]
        return replace(layers[0], sliding_window=None, layers=tuple(layers))

    def of_layer(self, layer: int) -> AttentionShape:
        """The shape of one layer."""
        return self if self.layers is None else self.layers[layer]

    @property
    def value_dim(self) -> int:
        """Elements per value head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    def check_sinks(self, sinks: Tensor | None) -> None:
        """Check that a layer passes sinks if the shape has them, and none if it has not.

        Raises:
            ConfigError: sinks are missing, or given to a shape without sinks.
        """
        if (sinks is not None) != self.sinks:
            raise ConfigError(
                f"AttentionShape.sinks is {self.sinks}, but sinks were {'not ' if sinks is None else ''}given."
            )

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def cache_spec(
        self, num_layers: int, block_size: int, dtype: torch.dtype, *, fp8: bool = False
    ) -> KVCacheSpec | LayersCacheSpec:
        """The cache that layers of this shape need.

        Raises:
            ConfigError: there are shapes of fewer layers.
        """
        if self.layers is not None and len(self.layers) < num_layers:
            raise ConfigError(f"{self} has shapes of {len(self.layers)} layers, but the cache has {num_layers} layers.")
        specs = [
            KVCacheSpec(1, of.num_kv_heads, of.head_dim, of.v_head_dim, block_size=block_size, dtype=dtype, fp8=fp8)
            for of in (self.layers or (self,))[:num_layers]
        ]
        return replace(specs[0], num_layers=num_layers) if len(set(specs)) == 1 else LayersCacheSpec.of(specs)


@dataclass(frozen=True)
class MLAShape:
    """The shape of a multi-head latent attention layer on this rank.

    Attributes:
        num_heads: query heads.
        kv_lora_rank: elements of the latent.
        qk_nope_head_dim: elements of the part of a query or key head that is not rotated.
        qk_rope_head_dim: elements of the part that is rotated; all key heads share one rotated part.
        v_head_dim: elements of a value head.
        scale: factor on the scores; None is `(qk_nope_head_dim + qk_rope_head_dim) ** -0.5`.

    Source: DeepSeek-V2 (2024), section 2.1.
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float | None = None

    def __post_init__(self) -> None:
        sizes = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        check_positive("attention", self, *sizes)

    @property
    def qk_head_dim(self) -> int:
        """Elements of an expanded query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores that is in force."""
        return self.qk_head_dim**-0.5 if self.scale is None else self.scale

    def cache_spec(self, num_layers: int, block_size: int, dtype: torch.dtype, *, fp8: bool = False) -> MLACacheSpec:
        """The cache that layers of this shape need."""
        return MLACacheSpec(
            num_layers, self.kv_lora_rank, self.qk_rope_head_dim, block_size=block_size, dtype=dtype, fp8=fp8
        )


Shape = AttentionShape | MLAShape


@dataclass(frozen=True)
class RopeTable:
    """Rotary embedding of a step's tokens, as a table: fused kernels rotate and quantise in one pass.

    Attributes:
        cos_sin: `[max_position, rope_dim]` float32; the cosines of a position in the first half, its sines in the
            second.
        positions: `[T]` int64.
        interleaved: pairs are neighbours (2i, 2i + 1), as in DeepSeek; False pairs i with i + rope_dim / 2.
    """

    cos_sin: Tensor
    positions: Tensor
    interleaved: bool = True

    @cached_property
    def _cos_and_sin(self) -> tuple[Tensor, Tensor]:
        """Each `[T, rope_dim / 2]`; looked up once per step, not per layer."""
        cos, sin = self.cos_sin[self.positions].to(torch.float32).chunk(2, dim=-1)
        return cos, sin

    def rotate(self, x: Tensor) -> Tensor:
        """`x` `[T, ..., rope_dim]` rotated to its tokens' positions, in the same layout and dtype."""
        cos, sin = self._cos_and_sin
        shape = (x.shape[0], *(1,) * (x.dim() - 2), cos.shape[-1])
        cos, sin = cos.view(shape), sin.view(shape)
        wide = x.float()
        if self.interleaved:
            a, b = wide[..., 0::2], wide[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)
        a, b = wide.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


@dataclass(frozen=True)
class MLAInputs:
    """One layer's inputs of multi-head latent attention. The model fills them in.

    Queries and keys are not rotated yet: a fused kernel rotates them, all other code calls `rope.rotate`.

    Attributes:
        q_nope: `[T, num_heads, qk_nope_head_dim]`.
        q_rope: `[T, num_heads, qk_rope_head_dim]`.
        latent: `[T, kv_lora_rank]`, normalised.
        k_rope: `[T, qk_rope_head_dim]`.
        w_uk: `[num_heads, qk_nope_head_dim, kv_lora_rank]`: `k_nope = latent @ w_uk^T`, and absorbed into the query
            `q_latent = q_nope @ w_uk`.
        w_uv: `[num_heads, kv_lora_rank, v_head_dim]`: `v = latent @ w_uv`; absorbed, the output is
            `attended latent @ w_uv`.
        rope: the rotary embedding of these tokens.
    """

    q_nope: Tensor
    q_rope: Tensor
    latent: Tensor
    k_rope: Tensor
    w_uk: Tensor
    w_uv: Tensor
    rope: RopeTable


class AttentionPlan(Protocol):
    """A back end's plan for one batch. Valid for that step, and for all of its layers."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        """Store the new keys and values, then attend causally over everything each request has in the cache.

        Args:
            q: `[T, num_heads, head_dim]`, already rotated; `T` is the length of the metadata's `slot_mapping`.
            k: `[T, num_kv_heads, head_dim]`, already rotated.
            v: `[T, num_kv_heads, value_dim]`.
            sinks: `[num_heads]`, the layer's terms for the softmax's denominator (logits), where the shape has sinks.

        Returns:
            `[T, num_heads, value_dim]`; rows of padding are 0. Valid until the plan's next `forward`; not to be written
            to.
        """


class MLAPlan(Protocol):
    """A plan for multi-head latent attention; valid as long as an `AttentionPlan`."""

    def forward(self, inputs: MLAInputs, layer: int) -> Tensor:
        """Store the new latents, then attend: decode absorbed, over latents; prefill expanded, over keys and values.

        Returns:
            `[T, num_heads, v_head_dim]`; rows of padding are 0.
        """


@dataclass(frozen=True)
class BackendTraits:
    """What a back end supports. Making a back end that lacks a trait of the model fails, and the error names the trait.

    Attributes:
        mha: multi-head and grouped-query attention (`AttentionShape`).
        mla: multi-head latent attention (`MLAShape`).
        devices: device types that it runs on.
        sliding_window, soft_cap, sinks, v_head_dim: see `AttentionShape`; `v_head_dim` is one that is not `head_dim`.
        tree_mask: takes a verify batch with a custom mask; a chain of drafts needs none.
        fp8: reads an fp8 cache.
        graphs: supports `plan_for_graph` and `replan`.
        block_sizes: page sizes, in tokens, that its kernels take; None is any.
        seq_len_fill: the `seq_lens` entry of a padding request in a captured graph.
    """

    mha: bool = True
    mla: bool = False
    devices: tuple[str, ...] = ("cuda",)
    sliding_window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    v_head_dim: bool = False
    tree_mask: bool = False
    fp8: bool = False
    graphs: bool = False
    block_sizes: tuple[int, ...] | None = None
    seq_len_fill: int = 1


@dataclass(frozen=True)
class GraphLimits:
    """The largest step that is ever captured; buffers are made for it once.

    Attributes:
        max_reqs: requests, padding requests included.
        max_tokens: tokens, padding included.
        max_seq_len: tokens of a request in the cache; a captured kernel's scalars are computed for this length.
    """

    max_reqs: int
    max_tokens: int
    max_seq_len: int


class AttentionBackend(Protocol):
    """Makes plans for one lane of one model's attention over one KV cache.

    The constructor allocates nothing large; the workspace is allocated and zeroed with the first plan.
    """

    name: ClassVar[str]
    traits: ClassVar[BackendTraits]

    def __init__(self, shape: Any, kv_cache: Any) -> None: ...

    @property
    def nbytes(self) -> int:
        """Bytes that this object holds now: its workspace and its graph buffers. The KV cache is not counted."""

    def plan(self, metadata: CommonAttentionMetadata) -> Any:
        """Prepare everything that is computed once per step, for one batch.

        Raises:
            ConfigError: the batch needs something that this back end lacks (a tree mask).
        """

    def init_graph_buffers(self, limits: GraphLimits) -> None:
        """Make the buffers that all captured plans share.

        Raises:
            ConfigError: this back end cannot be captured.
        """

    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> Any:
        """As `plan`, but every tensor a kernel reads lives in the graph buffers, and every scalar is the worst case.

        Raises:
            ConfigError: there are no graph buffers, or the batch is larger than they are.
        """

    def replan(self, plan: Any, metadata: CommonAttentionMetadata) -> None:
        """Make a plan of `plan_for_graph` describe another batch with the same number of requests and tokens.

        A smaller batch is padded if the back end can do that, else refused. Allocates no device memory and moves no
        pointer. Plans of one back end object share its graph buffers: `replan` of one makes all others invalid.

        Raises:
            ConfigError: the batch has another size than the plan, or exceeds the limits.
        """


class EagerOnly:
    """Mixed into back ends that cannot be captured."""

    name: ClassVar[str]

    def _refuse(self, *given: Any, **named: Any) -> Any:
        """See `AttentionBackend`; always refuses."""
        raise ConfigError(
            f"attention back end {self.name!r} cannot run in a CUDA graph. Choose another one, or cudagraph_mode none."
        )

    init_graph_buffers = plan_for_graph = replan = _refuse
