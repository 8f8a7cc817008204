"""Attention back ends behind one interface, chosen by name."""

from attention.backends.base import AttentionBackend, AttentionPlan, AttentionShape
from attention.backends.registry import attention_backends, make_attention_backend, register_attention_backend

__all__ = [
    "AttentionBackend",
    "AttentionPlan",
    "AttentionShape",
    "attention_backends",
    "make_attention_backend",
    "register_attention_backend",
]
