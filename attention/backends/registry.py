"""Attention back ends by name. A back end is imported when it is chosen, so that a CPU never imports CUDA."""

from __future__ import annotations

from typing import cast

from attention.backends.base import AttentionBackend, AttentionShape
from attention.kv_cache import PagedKVCache
from ubatch import ConfigError, LazyRegistry

__all__ = ["attention_backends", "make_attention_backend", "register_attention_backend"]

_BACKENDS = LazyRegistry("attention back end", {"torch": "attention.backends.torch_sdpa:TorchAttentionBackend"})


def register_attention_backend(name: str, target: str) -> None:
    """Make a back end known.

    Args:
        name: what `--attention-backend` calls it.
        target: `"package.module:Class"`; imported on first use.

    Raises:
        ConfigError: the name is taken by another class, or the target is not of that form.
    """
    _BACKENDS.register(name, target)


def attention_backends() -> tuple[str, ...]:
    """The known names, sorted."""
    return _BACKENDS.names()


def make_attention_backend(name: str, shape: AttentionShape, kv_cache: PagedKVCache) -> AttentionBackend:
    """The named back end for one model and one cache.

    Raises:
        ConfigError: the name is unknown, or shape and cache do not fit.
    """
    backend = cast("type[AttentionBackend]", _BACKENDS.load(name))
    if (shape.num_kv_heads, shape.head_dim) != (kv_cache.spec.num_kv_heads, kv_cache.spec.head_dim):
        raise ConfigError(
            f"attention has {shape.num_kv_heads} key/value heads of {shape.head_dim}, the KV cache "
            f"{kv_cache.spec.num_kv_heads} of {kv_cache.spec.head_dim}; make both from the same model config."
        )
    return backend(shape, kv_cache)
