"""The `trtllm_mha` back end of a batch, and batches whose queries fp8 holds exactly."""

from __future__ import annotations

from dataclasses import replace

from attention_batches import Batch
from flashinfer_standin import FP8

from attention import PagedKVCache, make_attention_backend
from attention.backends.trtllm.mha import TRTLLMMHABackend
from attention.kv_cache import quantize_fp8


def backend_of(batch: Batch, cache: PagedKVCache) -> TRTLLMMHABackend:
    backend = make_attention_backend("trtllm_mha", batch.shape, cache)
    assert isinstance(backend, TRTLLMMHABackend)
    return backend


def fp8_queries(batch: Batch) -> Batch:
    """The same with queries that fp8 holds exactly, as the kernel gets them in fp8."""
    return replace(batch, q=quantize_fp8(batch.q, 1.0).view(FP8).float())
