"""Copies of a call's arguments, for lanes that must not write to the caller's own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ubatch.calls.caches import CacheSplitter
from ubatch.calls.containers import PLAIN, attributes_of, tensors_in

__all__ = ["Copier", "like"]


def like(part: Tensor, whole: Tensor) -> Tensor:
    """`part`, which was cut or copied from `whole`, with the plain ones of its attributes.

    Raises:
        TypeError: it is of another class. A tensor stands for a parameter.
    """
    if type(part) is not type(whole) and type(whole) is not Parameter:
        raise TypeError(f"a part of it is a {type(part).__name__}")
    if whole.__dict__:
        part.__dict__.update((name, own) for name, own in attributes_of(whole).items() if isinstance(own, PLAIN))
    return part


class Copier:
    """Copies the leaves of a call. An object that occurs twice in the call is copied once.

    Args:
        order: see `CallPlan.copied`.
        rows: number of rows of the call.
    """

    def __init__(self, order: Sequence[int] | None, rows: int) -> None:
        self._order = order
        self._rows = rows
        self._made: dict[tuple[int, int | None], Any] = {}

    def copy(self, value: Any, dim: int | None, splitter: CacheSplitter | None = None) -> Any:
        """A copy of one leaf that is split along `dim`, with the rows in `order`."""
        key = id(value), dim
        if key not in self._made:
            self._made[key] = self._copy(value, dim, splitter)
        return self._made[key]

    def _copy(self, value: Any, dim: int | None, splitter: CacheSplitter | None) -> Any:
        order = self._order if dim is not None or splitter is not None else None
        if isinstance(value, Tensor):
            return _copy_tensor(value, dim, order)
        if order is None:
            kept = splitter is None and not isinstance(value, list | tuple) and not any(True for _ in tensors_in(value))
            return value if kept else _copy_object(value)
        if splitter is None:
            return type(value)(value[row] for row in order)
        single = splitter.split(_copy_object(value), [slice(row, row + 1) for row in range(self._rows)])
        return splitter.merge([_copy_object(single[row]) for row in order], None)


def _copy_object(value: Any) -> Any:
    """A deep copy; plain `copy.deepcopy` refuses tensors that were computed with gradients."""
    return copy.deepcopy(value, {id(tensor): _copy_tensor(tensor, None, None) for tensor in tensors_in(value)})


def _copy_tensor(value: Tensor, dim: int | None, order: Sequence[int] | None) -> Tensor:
    in_graph = value.requires_grad and not value.is_leaf and torch.is_grad_enabled()
    source = value if in_graph else value.detach()
    if order is None or dim is None:
        made = source.clone()
    else:
        made = source.index_select(dim, torch.tensor(order, dtype=torch.long, device=value.device))
    return like(made if in_graph else made.requires_grad_(value.requires_grad), value)
