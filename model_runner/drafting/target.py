"""The part of the target's runner that a draft network needs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch

from attention import MLAKVCache, PagedKVCache, RequestToTokenTable, UBatchAttention
from model_runner.decoder.base import CausalLM, ModelConfig
from model_runner.graphs.batches import CapturedSteps
from model_runner.graphs.steps import GraphSteps
from model_runner.parallel.tensor_parallel import TensorParallel
from model_runner.step.streams import StepStreams
from moe import All2All

__all__ = ["TargetRunner"]


class TargetRunner(Protocol):
    """The target's runner, as draft networks see it; `ModelRunner` documents each attribute.

    Loading a network reads the first block; a proposer, which is made with the KV cache, reads both.
    """

    model_path: Path
    load_format: str
    dtype: torch.dtype
    device: torch.device
    config: ModelConfig
    model: CausalLM
    max_model_len: int
    all2all: All2All
    experts_backend: str

    tensor_parallel: TensorParallel | None
    streams: StepStreams
    kv_cache: PagedKVCache | MLAKVCache
    request_table: RequestToTokenTable
    attention: UBatchAttention
    graphs: GraphSteps | None

    def together(self) -> AbstractContextManager[None]:
        """Context for an action that the ranks of a replica take together."""
        ...

    def capture_beside(self, steps: CapturedSteps) -> None:
        """Capture a draft network's steps with the target's."""
        ...
