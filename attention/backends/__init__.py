"""Attention back ends: one interface, chosen by name, imported only when chosen."""

from attention.backends.registry import (
    attention_backends,
    fastest_attention_backend,
    make_attention_backend,
    register_attention_backend,
    resolve_attention_backend,
    usable_attention_backends,
)
from attention.interface import (
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
