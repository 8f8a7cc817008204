"""What the captured steps of a model and of its draft network have in common: their setting, and batches to capture.

In a batch to capture every place is taken by the shortest sequence there can be, and nothing of it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attention import CommonAttentionMetadata, MLAKVCache, PagedKVCache, SpecVerifyInput
from model_runner.step.graph_sizes import GraphShape
from ubatch import CapturedGraph, GraphBackend

__all__ = ["CapturedSteps", "GraphSetting", "batch_to_capture"]


@dataclass(frozen=True)
class GraphSetting:
    """How a runner captures.

    Attributes:
        asked: the `cudagraph_mode` it was made with.
        sizes: in requests, ascending.
        max_seq_len: tokens of the longest sequence that ever comes.
        backend: captures and replays; all graphs share its pool, as they never run at once.
        planning: entered around what plans attention; see `StepStreams.planning`.
    """

    asked: str
    sizes: tuple[int, ...]
    max_seq_len: int
    backend: GraphBackend
    planning: Callable[[], AbstractContextManager[None]]


class CapturedSteps(Protocol):
    """Steps of one network that are captured: a runner's, and with them others (`ModelRunner.capture_beside`)."""

    @property
    def shapes(self) -> tuple[GraphShape, ...]:
        """Everything that is captured, in the order of capture."""
        ...

    def capture(
        self, progress: Callable[[CapturedGraph], None] | None = None, only: Sequence[GraphShape] | None = None
    ) -> list[CapturedGraph]:
        """Capture all of it, or only some of `shapes`; `progress` is called after each graph."""
        ...

    def drop(self) -> None:
        """Give all graphs back."""
        ...


def batch_to_capture(shape: GraphShape, kv_cache: PagedKVCache | MLAKVCache) -> CommonAttentionMetadata:
    """A lane of a graph, full. Keys and values are not kept; drafts that have a mask are chains.

    Args:
        shape: of the graph.
        kv_cache: that the steps use.
    """
    requests, tokens, device = shape.lane_requests, shape.tokens_per_request, kv_cache.device
    lens = [tokens] * requests
    table = torch.zeros(requests, kv_cache.spec.blocks_for(tokens), dtype=torch.int32, device=device)
    slots = torch.full((requests * tokens,), -1, dtype=torch.int64, device=device)
    drafts = _masked_chains(requests, tokens, device) if shape.tree else None
    return CommonAttentionMetadata.build(lens, lens, table, slots, shape.mode, drafts)


def _masked_chains(requests: int, nodes: int, device: torch.device) -> SpecVerifyInput:
    def numbers(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=device)

    mask = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril().flatten().repeat(requests)
    links = (numbers(requests, nodes) - 1 for _ in range(3))
    rows = numbers(requests * nodes)
    return SpecVerifyInput(nodes, (0,) * requests, rows, rows, mask, *links)
