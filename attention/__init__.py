"""Floor 2: attention over a paged KV cache, and the metadata that describes a step's batch.

modes        the forward modes, as one table
metadata     one description of a batch for all back ends, and its split into lanes; more of it for a batch of drafts
kv_cache     the pools: keys and values, or latents
kv_tables    which blocks are free, which request has which, and which requests read KV that others of the same batch
             write, and so must not run before them
interface    what a back end is, and the shape of a model's attention
backends     one interface, one plan per step and lane
kernels      Triton kernels of the `triton` back end
linear       layers with a recurrent state per request in place of keys and values
graph_buffers  a batch's tensors at fixed addresses, for captured CUDA graphs
lanes        back ends and plans of a whole batch, of its lanes, and of the consecutive decode steps that draft a chain
lse          attention over pieces of the keys, and the merging of the results
reference    the slow reference implementation that tests compare with
"""

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
    GraphLimits,
    MLAInputs,
    MLAPlan,
    MLAShape,
    RopeTable,
)
from attention.kv_cache import (
    CacheSpec,
    KVCache,
    KVCacheError,
    KVCacheExhausted,
    KVCacheSpec,
    LayersCacheSpec,
    LayersKVCache,
    MLACacheSpec,
    MLAKVCache,
    PagedKVCache,
    make_kv_cache,
)
from attention.kv_tables import BlockAllocator, RequestToTokenTable, reads_of_later_writes
from attention.lanes import HybridPlan, MultiStepDraftAttention, UBatchAttention
from attention.linear.states import GatedDeltaShape, StatePool
from attention.metadata import CommonAttentionMetadata, SpecVerifyInput, split_attn_metadata
from attention.modes import MODES, Kernel, ModeTraits, SplitKind, refuse_unsupported_model
from attention.reference import reference_attention, reference_mla

__all__ = [
    "MODES",
    "AttentionBackend",
    "AttentionPlan",
    "AttentionShape",
    "BackendTraits",
    "BlockAllocator",
    "CacheSpec",
    "CommonAttentionMetadata",
    "GatedDeltaShape",
    "GraphLimits",
    "HybridPlan",
    "KVCache",
    "KVCacheError",
    "KVCacheExhausted",
    "KVCacheSpec",
    "Kernel",
    "LayersCacheSpec",
    "LayersKVCache",
    "MLACacheSpec",
    "MLAInputs",
    "MLAKVCache",
    "MLAPlan",
    "MLAShape",
    "ModeTraits",
    "MultiStepDraftAttention",
    "PagedKVCache",
    "RequestToTokenTable",
    "RopeTable",
    "SpecVerifyInput",
    "SplitKind",
    "StatePool",
    "UBatchAttention",
    "attention_backends",
    "fastest_attention_backend",
    "make_attention_backend",
    "make_kv_cache",
    "reads_of_later_writes",
    "reference_attention",
    "reference_mla",
    "refuse_unsupported_model",
    "register_attention_backend",
    "resolve_attention_backend",
    "split_attn_metadata",
    "usable_attention_backends",
]
