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
from wrapping import children_of
from zoo_check import assert_same, seeded
from zoo_entry import ODD, Entry


def rows_are_independent(entry: Entry, module: nn.Module) -> bool:
    """Whether the outputs of parts of a batch make the output of the batch."""
    with seeded(0), torch.no_grad():
        call = entry.arguments(ODD)
        rows = next(tensor.shape[0] for _, tensor in tensors_in((call.args, call.kwargs)))
        bounds = [slice(0, rows // 2), slice(rows // 2, rows)]
        parts = [copy.deepcopy(cut((call.args, call.kwargs), rows, part)) for part in bounds]
        one, other = (copy.deepcopy(module)(*args, **kwargs) for args, kwargs in parts)
        whole = dict(tensors_in(copy.deepcopy(module)(*call.args, **call.kwargs)))
    try:
        joined = dict(tensors_in(join(one, other)))
        for path, tensor in whole.items():
            assert_same(joined[path].data, tensor.data, path)
    except (AssertionError, RuntimeError, KeyError):
        return False
    return joined.keys() == whole.keys()


def cut(value: Any, rows: int, part: slice) -> Any:
    """Arguments with only the rows of `part`."""
    if isinstance(value, Tensor):
        return value[part] if value.dim() and value.shape[0] == rows else value
    if isinstance(value, Mapping):
        return {key: cut(child, rows, part) for key, child in value.items()}
    return type(value)(cut(child, rows, part) for child in value) if isinstance(value, list | tuple) else value


def join(one: Any, other: Any) -> Any:
    """What two parts are together: end to end in the dimension or the list that differs, else one of them.

    Raises:
        AssertionError: they do not differ in size, but in what they hold.
    """
    if isinstance(one, Tensor):
        differing = [dim for dim in range(one.dim()) if one.shape[dim] != other.shape[dim]]
        if not differing:
            assert_same(one.data, other.data)
        return torch.cat([one, other], differing[0]) if differing else one
    if isinstance(one, list | tuple) and len(one) != len(other):
        return [*one, *other]
    children = None if callable(one) else children_of(one)
    if children is None:
        return one
    return {key: join(child, children_of(other)[key]) for key, child in children.items()}


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors in containers and caches, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif not callable(value):
        for key, child in (children_of(value) or {}).items():
            yield from tensors_in(child, f"{path}.{key}")
