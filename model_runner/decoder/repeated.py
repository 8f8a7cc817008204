"""Decode steps on a CPU without the Python between their kernels: their calls are recorded once, and made again.

A step of one token per request calls the same kernels as every other step with as many rows, in memory that the
recording keeps. Only the attention plan's arguments, the embeddings and the rotation are new. So the third such step is
recorded, and later ones are repeated: for one request the layers take less than half of the time.

A lane has recordings of its own, and passes its points between the kernels. Where experts are on other ranks, dispatch,
experts and combine of a layer run as always between what is repeated.

Steps run as always with tensor parallelism, under a trace, torch's profiler or a `TorchDispatchMode`, if a module has
forward hooks, or if torch computes anything else in a layer.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attention import RopeTable
from model_runner.decoder.rope import Rotation
from ubatch import ForwardMode, current_schedule, get_forward_context
from ubatch.kernels import Rebinds, Recording
from ubatch.process import beat
from ubatch.trace import current_trace

_logger = logging.getLogger(__name__)

_RECORDED_AT = 3
"""Number of the step of a size that is recorded; the first ones may compile kernels."""
MOST_BYTES = 1 << 27
"""Most memory that the recordings of a model keep; the least recently used ones go."""

_Key = tuple[int, int, int, int, ForwardMode | None]

_Rotary = Sequence[Rotation | RopeTable]
"""A step's rotations: one, or one for each kind of layer."""

Layers = Callable[[Tensor, Any, Any, int | Tensor], Tensor]
"""A model's layers: from embeddings, rotations, attention plan and number of tokens to the hidden states."""


@dataclass
class _Recorded:
    """The calls of a step.

    Attributes:
        hidden, rotary: inputs, to be overwritten.
        result: the hidden states, overwritten by every repetition.
        hooks: those of the model's modules.
        weights: of the model's modules, and their addresses.
        recording: holds the calls' memory.
    """

    hidden: Tensor
    rotary: _Rotary
    result: Tensor
    hooks: Sequence[Mapping[int, Any]]
    weights: list[tuple[dict[str, nn.Parameter | None], str, int]]
    recording: Recording

    def valid(self, rotary: _Rotary) -> bool:
        """Whether all weights and the rotary table are where they were, and nobody has hooked into a layer."""
        for own, given in zip(self.rotary, rotary, strict=True):
            if isinstance(given, RopeTable) and given.cos_sin is not getattr(own, "cos_sin", None):
                return False
        for weights, name, address in self.weights:
            weight = weights[name]
            if weight is None or weight.data_ptr() != address:
                return False
        return not any(self.hooks)

    def repeat(self, hidden: Tensor, rotary: _Rotary, plan: Rebinds) -> Tensor:
        self.hidden.copy_(hidden)
        for own, given in zip(_of_step(self.rotary), _of_step(rotary), strict=True):
            own.copy_(given)
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
        modules: the model's modules; packed weights do not move.
    """

    def __init__(self, layers: Layers, modules: Callable[[], Iterable[nn.Module]]) -> None:
        self._layers, self._modules = layers, modules
        # By rows, compute threads, thread (scratch memory belongs to the one that recorded), schedule and mode (whose
        # load the experts count), in the order of use.
        self._recorded: dict[_Key, _Recorded] = {}
        self._seen: Counter[_Key] = Counter()
        self._least_bytes = 0.0  # of a row, as far as known
        self._refused = False
        self.repetitions = 0

    def __call__(self, hidden: Tensor, rotary: Sequence[Any], plan: Any, num_tokens: int | Tensor) -> Tensor:
        """See `Layers`."""
        rows = hidden.shape[0]
        if isinstance(num_tokens, int) and num_tokens == rows:
            context = get_forward_context()
            mode = None if context is None else context.mode
            key = (rows, torch.get_num_threads(), threading.get_ident(), current_schedule().fingerprint, mode)
            if not self._refused and _repeats(plan, rotary, rows):
                recorded = self._recorded.pop(key, None)
                if recorded is not None and recorded.valid(rotary):
                    self._recorded[key] = recorded
                    self.repetitions += 1
                    return recorded.repeat(hidden, rotary, plan)
                if recorded is not None:
                    del self._seen[key]
                self._seen[key] += 1
                if self._seen[key] == _RECORDED_AT and rows * self._least_bytes <= MOST_BYTES:
                    return self._record(key, hidden, rotary, plan)
        return self._layers(hidden, rotary, plan, num_tokens)

    def _record(self, key: _Key, hidden: Tensor, rotary: _Rotary, plan: Rebinds) -> Tensor:
        rows, modules = hidden.shape[0], list(self._modules())
        hidden, rotary = hidden.clone(), [_copied(each) for each in rotary]
        with Recording(MOST_BYTES) as recording:
            result = self._layers(hidden, rotary, plan, rows)
        self._refused = recording.computed is not None  # as it would be for every number of rows
        if recording.refused is not None:
            self._least_bytes = max(self._least_bytes, MOST_BYTES / rows)
            _logger.debug("decode steps of %d rows are not repeated from a recording: %s", rows, recording.refused)
            return result.clone()
        weights = [
            (module._parameters, name, weight.data_ptr())
            for module in modules
            for name, weight in module._parameters.items()
            if weight is not None
        ]
        hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._recorded[key] = _Recorded(hidden, rotary, result, hooks, weights, recording)
        while self._kept_bytes() > MOST_BYTES and len(self._recorded) > 1:
            unused = next(iter(self._recorded))
            del self._recorded[unused], self._seen[unused]
        return result.clone()

    def _kept_bytes(self) -> int:
        kept = {each: size for own in self._recorded.values() for each, (_, size) in own.recording.kept.items()}
        return sum(kept.values())


def _of_step(rotary: _Rotary) -> list[Tensor]:
    """The tensors that change from step to step."""
    tensors: list[Tensor] = []
    for each in rotary:
        tensors += (each.cos, each.sin) if isinstance(each, Rotation) else (each.positions,)
    return tensors


def _copied(rotary: Rotation | RopeTable) -> Rotation | RopeTable:
    """With tensors of its own, except the table, which serves all steps."""
    if isinstance(rotary, Rotation):
        return Rotation(rotary.cos.clone(), rotary.sin.clone())
    return replace(rotary, positions=rotary.positions.clone())


def _repeats(plan: Any, rotary: Sequence[Any], rows: int) -> bool:
    """Whether this step may be recorded or repeated."""
    if getattr(plan, "repeats", None) != rows:
        return False
    for each in rotary:
        if not isinstance(each, Rotation | RopeTable):
            return False
        if isinstance(each, RopeTable):
            first, last = each.positions.aminmax()
            if not 0 <= int(first) <= int(last) < each.cos_sin.shape[0]:  # the plan refuses it
                return False
    if torch._C._len_torch_dispatch_stack() or torch.autograd._profiler_enabled():  # they want to see every operator
        return False
    return torch.is_inference_mode_enabled() and current_trace() is None
