"""Whether a module's rows depend on each other, found out by hand: without the wrapper, and without its code.

The arguments are cut in two unequal parts, every tensor whose dimension 0 has the rows; the bare module runs on each;
the outputs are concatenated along the dimension in which the parts differ. An entry's outcome is held against this.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from zoo_check import assert_same, children_of, seeded
from zoo_entry import ODD, Entry


def rows_are_independent(entry: Entry, module: nn.Module) -> bool:
    """Whether the outputs of parts of a batch make the output of the batch."""
    with seeded(0), torch.no_grad():
        call = entry.arguments(ODD)
        rows = next(tensor.shape[0] for _, tensor in tensors_in((call.args, call.kwargs)))
        bounds = [slice(0, rows // 2), slice(rows // 2, rows)]
        parts = [copy.deepcopy(cut((call.args, call.kwargs), rows, part)) for part in bounds]
        outputs = [copy.deepcopy(module)(*args, **kwargs) for args, kwargs in parts]
        whole = dict(tensors_in(copy.deepcopy(module)(*call.args, **call.kwargs)))
    lanes = [dict(tensors_in(output)) for output in outputs]
    try:
        for path, tensor in whole.items():
            assert_same(merged(*(lane[path] for lane in lanes)), tensor.data, path)
    except (AssertionError, RuntimeError, KeyError):
        return False
    return all(lane.keys() == whole.keys() for lane in lanes)


def cut(value: Any, rows: int, part: slice) -> Any:
    """Arguments with only the rows of `part`."""
    if isinstance(value, Tensor):
        return value[part] if value.dim() and value.shape[0] == rows else value
    if isinstance(value, Mapping):
        return {key: cut(child, rows, part) for key, child in value.items()}
    return type(value)(cut(child, rows, part) for child in value) if isinstance(value, list | tuple) else value


def merged(one: Tensor, other: Tensor) -> Tensor:
    """Two parts put together; one of them where nothing follows the rows."""
    differing = [dim for dim in range(one.dim()) if one.shape[dim] != other.shape[dim]]
    if differing:
        return torch.cat([one, other], differing[0])
    assert_same(one.data, other.data)
    return one.data


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors in containers and caches, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif not callable(value):
        for key, child in (children_of(value) or {}).items():
            yield from tensors_in(child, f"{path}.{key}")
