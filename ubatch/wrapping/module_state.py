"""Side effects of a call: writes to the module's tensors and attributes, and random numbers drawn.

A proving call checks for them after its unsplit run, before the run in lanes. Weights are not copied; compared are:

    tensor of the module               the same object, its version counter, sums over blocks of its bytes, its gradient
    number, string, bool, None         the value
    list, dict, ...                    item by item
    random generator                   its state
    any other object                   its attributes; for this project's objects only tensors, for torch's none

Some writes do not raise the version counter (batch normalisation's running mean, numpy, `.data`), and inference tensors
have none; the sums detect these.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ubatch.calls.containers import FUNCTIONS, PLAIN

__all__ = ["ModuleState", "RandomState", "TensorMark"]

_BLOCK = 1024
_OWN = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules", "training"}
"""Attributes that torch sets in every module, mostly hooks."""
_OURS = frozenset({"ubatch", "moe", "attention", "model_runner"})
"""Packages whose objects may keep their own counters; these are safe in lanes."""
_OPAQUE = (ModuleType, type, torch.device, torch.dtype)


class ModuleState:
    """A snapshot of a module's state, to compare with a later state."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._marks = dict(_Walk().module("", model))

    def change(self) -> str | None:
        """The name of a value that has changed since the snapshot, or None."""
        now = dict(_Walk().module("", self._model))
        for path in self._marks.keys() ^ now.keys():
            return path
        return next((path for path, mark in self._marks.items() if mark != now[path]), None)


class TensorMark:
    """A snapshot that detects whether a tensor was written to or replaced."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor  # kept alive, so that no other tensor gets its id
        lazy = is_lazy(tensor)
        self._version = -1 if lazy or tensor.is_inference() else tensor._version
        self._sums = None if lazy else _block_sums(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorMark):
            return False
        if self._tensor is not other._tensor:  # a sharded weight is gathered and let go (FSDP), with the same values
            return any(hasattr(each, "to_local") for each in (self._tensor, other._tensor))
        if self._version != other._version:
            return False
        if self._sums is None or other._sums is None:
            return self._sums is other._sums
        return self._sums.shape == other._sums.shape and torch.equal(self._sums, other._sums)

    __hash__ = None  # type: ignore[assignment]


@torch.no_grad()
def _block_sums(tensor: Tensor) -> Tensor | None:
    """Sums over blocks of a tensor's bytes; None if its bytes cannot be read."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    if tensor.is_quantized or not tensor.numel() or not tensor.untyped_storage().nbytes():
        return None  # without memory: a shard that is not gathered
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64) if flat.storage_offset() % 8 == 0 else flat[:0].view(torch.int64)
    if not words.numel():
        return flat.sum(dtype=torch.int64).view(1)
    blocks = words.numel() // _BLOCK * _BLOCK
    return torch.cat(
        [
            words[:blocks].view(-1, _BLOCK).sum(1),
            words[blocks:].sum().view(1),
            flat[whole:].sum(dtype=torch.int64).view(1),
        ]
    )


class _Walk:
    """One walk through a module: every object is visited once, under the first name found."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def module(self, path: str, module: nn.Module) -> Iterator[tuple[str, object]]:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        for name, value in vars(module).items():
            if name in _OWN:
                continue
            if name in ("_parameters", "_buffers", "_modules"):
                for key, child in value.items():
                    yield from self.value(f"{path}{key}", child, plain=True)
            else:
                yield from self.value(f"{path}{name}", value, plain=True)

    def value(self, path: str, value: Any, *, plain: bool) -> Iterator[tuple[str, object]]:
        """Marks of an attribute; plain values are included only if `plain`."""
        if isinstance(value, PLAIN):
            if plain:
                yield path, (type(value), value) if value == value else (type(value), "nan")
            return
        if isinstance(value, nn.Module):
            yield from self.module(f"{path}.", value)
            return
        if isinstance(value, nn.Parameter):  # under every name: tied ones may be one object or two (FSDP)
            yield path, TensorMark(value)
            if value.grad is not None:
                yield f"{path}.grad", TensorMark(value.grad)
            return
        if id(value) in self._seen or isinstance(value, _OPAQUE):
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            yield path, TensorMark(value)
        elif isinstance(value, torch.Generator):
            yield path, bytes(value.get_state().tolist())
        elif isinstance(value, random.Random):
            yield path, value.getstate()
        elif type(value).__module__.startswith("numpy.random"):
            yield path, pickle.dumps(value)
        elif isinstance(value, Mapping):
            if plain:
                yield f"{path}.keys", (type(value), len(value))
            for key, child in list(value.items()):
                yield from self.value(f"{path}.{key}", child, plain=plain)
        elif isinstance(value, list | tuple | deque):
            if plain:
                yield f"{path}.length", (type(value), len(value))
            for index, child in enumerate(list(value)):
                yield from self.value(f"{path}.{index}", child, plain=plain)
        elif isinstance(value, set | frozenset):
            if plain:
                yield f"{path}.length", (type(value), len(value))
        elif callable(getattr(type(value), "tobytes", None)):  # an array of numpy's
            yield path, value.tobytes()
        elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, FUNCTIONS):
            package = type(value).__module__.partition(".")[0]
            for name, child in list(vars(value).items()) if package != "torch" else ():
                yield from self.value(f"{path}.{name}", child, plain=package not in _OURS)


class RandomState:
    """The states of torch's, Python's and numpy's own random generators."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._cuda = torch.cuda.get_rng_state_all() if cuda else []
        self._python = random.getstate()
        numpy: Any = sys.modules.get("numpy")  # not imported means not used
        self._numpy = None if numpy is None else numpy.random.get_state()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomState):
            return False
        return (
            torch.equal(self._cpu, other._cpu)
            and len(self._cuda) == len(other._cuda)
            and all(torch.equal(one, two) for one, two in zip(self._cuda, other._cuda, strict=True))
            and self._python == other._python
            and _as_plain(self._numpy) == _as_plain(other._numpy)
        )

    __hash__ = None  # type: ignore[assignment]

    def restore(self) -> None:
        """Restore these states."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _as_plain(numpy_state: Any) -> object:
    """A state whose array can be compared."""
    return None if numpy_state is None else [getattr(part, "tobytes", lambda own=part: own)() for part in numpy_state]
