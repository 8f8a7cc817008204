"""Common parts of the captured steps of a model and of its draft network: their setting, and batches to capture.

A batch to capture is full of sequences of the shortest possible length, and writes nothing to the KV cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from attention import CommonAttentionMetadata, KVCache, SpecVerifyInput
from model_runner.step.graph_sizes import GraphFamily, GraphShape
from ubatch import CapturedGraph, GraphBackend


@dataclass(frozen=True)
class GraphSetting:
    """A runner's settings for CUDA graphs.

    Attributes:
        asked: the `cudagraph_mode` it was made with.
        sizes: sizes to capture, in requests, ascending.
        max_seq_len: tokens of the longest possible sequence.
        backend: captures and replays; all graphs share its pool, as they never run at the same time.
        num_ranks: number of ranks that step together.
        tensor_parallel_size: number of ranks that share a replica.
    """

    asked: str
    sizes: tuple[int, ...]
    max_seq_len: int
    backend: GraphBackend
    planning: Callable[[], AbstractContextManager[None]]
    num_ranks: int
    tensor_parallel_size: int


class CapturedSteps(ABC):
    """The captured steps of one network: a runner's model, or a draft network (`ModelRunner.capture_beside`)."""

    families: tuple[GraphFamily, ...]
    _captured: dict[GraphShape, Any]

    @property
    def shapes(self) -> tuple[GraphShape, ...]:
        """Shapes to capture, in the order of capture: largest first, so that smaller graphs reuse its memory."""
        shapes = [shape for family in self.families for shape in family.shapes]
        return tuple(sorted(shapes, key=lambda shape: (shape.num_tokens, shape), reverse=True))

    @torch.inference_mode()
    def capture(
        self, progress: Callable[[CapturedGraph], None] | None = None, only: Sequence[GraphShape] | None = None
    ) -> list[CapturedGraph]:
        """Capture every shape.

        Args:
            progress: called after each graph.
            only: some of `shapes`, in their order; all by default.

        Raises:
            CaptureFailed: a capture failed; no step is replayed then.
        """
        graphs, captured = [], {}
        for shape in self.shapes if only is None else only:
            graph, captured[shape] = self._capture(shape)
            graphs.append(graph)
            if progress is not None:
                progress(graph)
        self._captured = captured
        return graphs

    @abstractmethod
    def drop(self) -> None:
        """Release all graphs; steps run eagerly until the next capture."""

    @abstractmethod
    def _capture(self, shape: GraphShape) -> tuple[CapturedGraph, Any]:
        """Capture one shape: the graph, and what its replay needs."""


def batch_to_capture(shape: GraphShape, kv_cache: KVCache) -> CommonAttentionMetadata:
    """A full batch for one lane of a graph. Keys and values are not stored; drafts with a tree mask are chains."""
    requests, tokens, device = shape.lane_requests, shape.tokens_per_request, kv_cache.device
    lens = [tokens] * requests
    table = torch.zeros(requests, kv_cache.spec.blocks_for(tokens), dtype=torch.int32, device=device)
    slots = torch.full((requests * tokens,), -1, dtype=torch.int64, device=device)
    drafts = _masked_chains(requests, tokens, device) if shape.tree else None
    return CommonAttentionMetadata.build(lens, lens, table, slots, shape.mode, drafts)


def _masked_chains(requests: int, nodes: int, device: torch.device) -> SpecVerifyInput:
    mask = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril().flatten().repeat(requests)
    links = torch.full((requests, nodes), -1, dtype=torch.int64, device=device)
    rows = torch.zeros(requests * nodes, dtype=torch.int64, device=device)
    return SpecVerifyInput(nodes, (0,) * requests, rows, rows, mask, links, links, links)
