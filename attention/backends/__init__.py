"""Attention back ends: one interface, chosen by name, imported only when chosen."""

from attention.backends.base import (
    AttentionBackend,
    AttentionPlan,
    AttentionShape,
    BackendTraits,
    EagerOnly,
    GraphLimits,
    MLAInputs,
    MLAPlan,
    MLAShape,
    RopeTable,
)
from attention.backends.registry import (
    attention_backends,
    fastest_attention_backend,
    make_attention_backend,
    register_attention_backend,
    resolve_attention_backend,
    usable_attention_backends,
)

__all__ = [
    "AttentionBackend",
    "AttentionPlan",
    "AttentionShape",
    "BackendTraits",
    "EagerOnly",
    "GraphLimits",
    "MLAInputs",
    "MLAPlan",
    "MLAShape",
    "RopeTable",
    "attention_backends",
    "fastest_attention_backend",
    "make_attention_backend",
    "register_attention_backend",
    "resolve_attention_backend",
    "usable_attention_backends",
]
