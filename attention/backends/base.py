"""The one interface of all attention back ends.

    backend = make_attention_backend("torch", shape, kv_cache)      once
    plan = backend.plan(metadata)                                   once per step and lane
    out = plan.forward(q, k, v, layer)                              once per layer

Everything that belongs to one step of one lane lives in its plan, which travels in that lane's forward context. The
back end itself keeps nothing that two lanes could overwrite for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from attention.kv_cache import PagedKVCache
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError

__all__ = ["AttentionBackend", "AttentionPlan", "AttentionShape"]


@dataclass(frozen=True)
class AttentionShape:
    """What a layer of causal attention looks like on this rank.

    Attributes:
        num_heads: query heads; a multiple of `num_kv_heads`.
        num_kv_heads: key/value heads.
        head_dim: numbers per head.
        scale: factor on the scores; None is `head_dim ** -0.5`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"attention: {name} must be at least 1, not {getattr(self, name)}.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"attention: {self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly."
            )

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores that is in force."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads


class AttentionPlan(Protocol):
    """What a back end worked out for one metadata. Valid for that step, and for all of its layers."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Store the new keys and values, then attend causally over everything each request has in the cache.

        Args:
            q: `[T, num_heads, head_dim]`, already rotated; `T` is the length of the metadata's `slot_mapping`.
            k: `[T, num_kv_heads, head_dim]`, already rotated.
            v: `[T, num_kv_heads, head_dim]`.
            layer: which layer's cache.

        Returns:
            `[T, num_heads, head_dim]`; rows of padding are 0.
        """
        ...


class AttentionBackend(Protocol):
    """Makes plans for one model's attention over one KV cache."""

    name: ClassVar[str]

    def __init__(self, shape: AttentionShape, kv_cache: PagedKVCache) -> None: ...

    def plan(self, metadata: CommonAttentionMetadata) -> AttentionPlan:
        """Everything that can be worked out once per step, for one metadata."""
        ...
