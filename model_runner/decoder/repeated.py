"""Decode steps on a CPU without the Python between their kernels: their calls are recorded once, and made again.

A step of one token per request calls the same kernels as every other step with as many rows, in memory that the
recording keeps. Only the attention plan's arguments, the embeddings and the rotation are new. So the third such step is
recorded, and later ones are repeated: for one request the layers take less than half of the time.

Steps run as always in a lane, with tensor parallelism, under a trace or torch's profiler, if experts are on other
ranks, or if torch computes anything in a layer.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model_runner.decoder.rope import Rotation
from ubatch import dbo_enabled
from ubatch.kernels.recording import Rebinds, Recording
from ubatch.process.heartbeat import beat
from ubatch.trace.spans import current_trace

__all__ = ["RepeatedLayers"]

_logger = logging.getLogger(__name__)

_RECORDED_AT = 3
"""Number of the step of a size that is recorded; the first ones may compile kernels."""
MOST_BYTES = 1 << 27
"""Most memory that the recordings of a model keep."""

Layers = Callable[[Tensor, Any, Any, int | Tensor], Tensor]
"""A model's layers: from embeddings, rotation, attention plan and number of tokens to the hidden states."""


@dataclass
class _Recorded:
    """The calls of a step.

    Attributes:
        hidden, cos, sin: inputs, to be overwritten.
        result: the hidden states, overwritten by every repetition.
        weights: the model's plain weights, and the addresses that they had.
        recording: holds the calls' memory.
    """

    hidden: Tensor
    cos: Tensor
    sin: Tensor
    result: Tensor
    weights: list[tuple[Tensor, int]]
    recording: Recording

    @property
    def valid(self) -> bool:
        """Whether the weights are where they were: `model.to` may move them."""
        return all(weight.data_ptr() == address for weight, address in self.weights)

    def repeat(self, hidden: Tensor, rotary: Rotation, plan: Rebinds) -> Tensor:
        self.hidden.copy_(hidden)
        self.cos.copy_(rotary.cos)
        self.sin.copy_(rotary.sin)
        for call in self.recording.calls:
            arguments = call.arguments
            if call.layer is not None:
                beat()
                arguments = plan.rebound(call.layer, arguments)
            call.function(*arguments)
        return self.result.clone()


class RepeatedLayers:
    """Runs a model's layers, and repeats the recorded calls of decode steps.

    Args:
        layers: see `Layers`.
        weights: the model's parameters; packed weights do not move.
    """

    def __init__(self, layers: Layers, weights: Callable[[], Iterable[Tensor]]) -> None:
        self._layers, self._weights = layers, weights
        # By rows, compute threads, and thread: scratch memory belongs to the thread that recorded.
        self._recorded: dict[tuple[int, int, int], _Recorded] = {}
        self._seen: Counter[tuple[int, int, int]] = Counter()
        self.repetitions = 0

    def __call__(self, hidden: Tensor, rotary: Any, plan: Any, num_tokens: int | Tensor) -> Tensor:
        """See `Layers`."""
        rows = hidden.shape[0]
        if isinstance(num_tokens, int) and num_tokens == rows and _repeats(plan, rotary):
            key = (rows, torch.get_num_threads(), threading.get_ident())
            recorded = self._recorded.get(key)
            if recorded is not None and recorded.valid:
                self.repetitions += 1
                return recorded.repeat(hidden, rotary, plan)
            self._seen[key] += 1
            if self._seen[key] == _RECORDED_AT:
                return self._record(key, hidden, rotary, plan)
        return self._layers(hidden, rotary, plan, num_tokens)

    def _record(self, key: tuple[int, int, int], hidden: Tensor, rotary: Rotation, plan: Rebinds) -> Tensor:
        hidden, cos, sin = hidden.clone(), rotary.cos.clone(), rotary.sin.clone()
        with Recording() as recording:
            result = self._layers(hidden, Rotation(cos, sin), plan, hidden.shape[0])
        kept = sum(each.recording.kept_bytes for each in self._recorded.values())
        refused = recording.refused
        if refused is None and kept + recording.kept_bytes > MOST_BYTES:
            refused = f"they would keep {(kept + recording.kept_bytes) >> 20} MiB"
        if refused is not None:
            _logger.debug("decode steps of %d rows are not repeated from a recording: %s", hidden.shape[0], refused)
        else:
            weights = [(weight, weight.data_ptr()) for weight in self._weights()]
            self._recorded[key] = _Recorded(hidden, cos, sin, result, weights, recording)
        return result.clone()


def _repeats(plan: Any, rotary: Any) -> bool:
    """Whether this step may be recorded or repeated."""
    if not getattr(plan, "repeats", False) or not isinstance(rotary, Rotation) or dbo_enabled():
        return False
    return torch.is_inference_mode_enabled() and current_trace() is None and not torch.autograd._profiler_enabled()
