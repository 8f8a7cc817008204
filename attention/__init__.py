"""Floor 2: attention over a paged KV cache, and what a step must say about its batch.

metadata    one description of a batch for all back ends, and its split into lanes
kv_cache    the blocks: memory, allocation, and which request has which
backends    one interface, one plan per step and lane
reference   the slow, obvious oracle
"""

from attention.backends import (
    AttentionBackend,
    AttentionPlan,
    AttentionShape,
    attention_backends,
    make_attention_backend,
    register_attention_backend,
)
from attention.kv_cache import BlockAllocator, BlockTable, KVCacheError, KVCacheExhausted, KVCacheSpec, PagedKVCache
from attention.metadata import CommonAttentionMetadata, split_attn_metadata
from attention.reference import reference_attention

__all__ = [
    "AttentionBackend",
    "AttentionPlan",
    "AttentionShape",
    "BlockAllocator",
    "BlockTable",
    "CommonAttentionMetadata",
    "KVCacheError",
    "KVCacheExhausted",
    "KVCacheSpec",
    "PagedKVCache",
    "attention_backends",
    "make_attention_backend",
    "reference_attention",
    "register_attention_backend",
    "split_attn_metadata",
]
