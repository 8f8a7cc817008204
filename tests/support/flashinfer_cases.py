"""Batches for the back ends on flashinfer's kernels, and stand-ins in the kernels' place."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from attention_batches import Batch, MLABatch, make_batch, make_mla_batch
from flashinfer_standin import COUNTER_BYTES
from torch import Tensor

from attention import GraphLimits, MLAShape
from attention.backends.flashinfer import mha as flashinfer
from attention.backends.flashinfer import mla as flashinfer_mla
from attention.backends.flashinfer.mha import FlashInferBackend
from attention.backends.flashinfer.mla import FlashInferMLABackend
from attention.backends.flashinfer_kernels import FlashInferKernel
from attention.backends.trtllm import mha as trtllm_mha
from attention.backends.trtllm import mla as trtllm_mla
from attention.backends.trtllm.mha import TRTLLMMHABackend
from attention.backends.trtllm.mla import TRTLLMMLABackend

MLA = MLAShape(num_heads=2, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
DECODE = [(20, 1), (3, 1), (15, 1), (16, 1)]
PREFIX = [(17, 5), (0, 3), (33, 2)]
MIXED = [(40, 1), (0, 6), (9, 4), (5, 1)]
VERIFY = [(9, 4), (30, 4), (1, 4)]
EXTEND = [(9, 2), (20, 4), (5, 1)]
BACKENDS = {
    flashinfer: FlashInferBackend,
    flashinfer_mla: FlashInferMLABackend,
    trtllm_mha: TRTLLMMHABackend,
    trtllm_mla: TRTLLMMLABackend,
}
LIMITS = GraphLimits(max_reqs=6, max_tokens=24, max_seq_len=96)


def install(monkeypatch: pytest.MonkeyPatch, find: Callable[[FlashInferKernel], Any]) -> None:
    """`find` in the place of flashinfer, small workspaces, and all back ends on the CPU."""
    for module, backend in BACKENDS.items():
        monkeypatch.setattr(module, "find_kernel", find)
        monkeypatch.setattr(module, "WORKSPACE_BYTES", 4 * COUNTER_BYTES)
        monkeypatch.setattr(backend, "traits", replace(backend.traits, devices=("cpu",)))


def run(plan: Any, batch: Batch | MLABatch, layer: int = 0) -> Tensor:
    return batch.forward(plan, layer)


def make(requests: list[tuple[int, int]], *, mla: bool = False, **options: Any) -> Batch | MLABatch:
    if mla:
        return make_mla_batch(requests, **{"shape": MLA, "block_size": 16, **options})
    return make_batch(requests, **{"block_size": 16, **options})


def padded(requests: list[tuple[int, int]], num_queries: int, **options: Any) -> Batch | MLABatch:
    """A batch as a runner pads it for a graph of four requests."""
    rows = sum(new for _, new in requests)
    return make(requests + [(0, 0)] * (4 - len(requests)), padding=4 * num_queries - rows, **options)
