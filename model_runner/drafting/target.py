"""The part of the target's runner that a draft network needs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch

from model_runner.decoder.base import ModelConfig
from model_runner.graphs.batches import CapturedSteps
from model_runner.graphs.runner_graphs import CapturingRunner
from model_runner.graphs.steps import GraphSteps

__all__ = ["TargetRunner"]


class TargetRunner(CapturingRunner, Protocol):
    """The target's runner, as draft networks see it; `ModelRunner` documents each attribute."""

    model_path: Path
    load_format: str
    dtype: torch.dtype
    config: ModelConfig
    max_model_len: int
    experts_backend: str
    graphs: GraphSteps | None

    def together(self) -> AbstractContextManager[None]:
        """Context for an action that the ranks of a replica take together."""
        ...

    def capture_beside(self, steps: CapturedSteps) -> None:
        """Capture a draft network's steps with the target's."""
        ...
