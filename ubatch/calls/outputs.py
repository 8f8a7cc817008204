"""Merging the lanes' outputs of a call that was not proved, as their shapes suggest.

tensor    concatenated along the dimension that `output_dims` names, else along dimension 0 if only that one has
          the size of the call's rows or tokens; otherwise it is ambiguous. 0-dim tensors are refused
cache     the caller's, where it was an argument; else a new one, through its registered splitter
tuple, list, dict, dataclass      item by item
number, string, None, ...         kept if equal in all lanes; an int might count a lane's rows, so it must be named
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ubatch.calls.caches import splitter_for
from ubatch.calls.call_plan import CallPlan, LaneParts
from ubatch.calls.containers import PLAIN
from ubatch.calls.merging import Cached, Rule, cannot, columns_of, concatenated, mismatch, named_dim, rebuilt, sizes_of
from ubatch.schedules.vote import DeclineReason

_LANES = "in the lanes"


@dataclass(frozen=True)
class Guess(Rule):
    """Any output of a call that was not proved, and what it holds.

    Attributes:
        dims: `UBatchConfig.output_dims`: output -> dimension to concatenate, if it is not 0; None if all lanes return
            the same value.
    """

    dims: Mapping[str, int | None]

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        first = values[0]
        dim, named = named_dim(path, self.dims)
        if named and dim is None:
            return first
        if any(type(value) is int for value in values):
            raise cannot(path, "is an int, which may count a lane's rows")
        if all(value is first for value in values):
            return first
        if any(type(value) is not type(first) for value in values):
            raise mismatch(path, values, _LANES)
        if isinstance(first, Tensor):
            return _tensor(path, values, dim, parts)
        if splitter_for(first) is not None:
            return Cached().merge(path, values, parts)
        if isinstance(first, PLAIN) and all(value == first for value in values):
            return first
        if type(first) in (list, tuple) and all(isinstance(item, PLAIN) for item in itertools.chain(*values)):
            if named:
                return concatenated(values, 0)
            if any(item is not None for item in first) and [*map(len, values)] == [*parts.rows]:
                raise cannot(path, f"is a {type(first).__name__} of plain values, maybe one per row")
        columns = columns_of(path, values, _LANES)
        return rebuilt(path, first, [self.merge(f"{path}.{key}", column, parts) for key, column in columns.items()])


def _tensor(path: str, values: Sequence[Tensor], dim: int | None, parts: LaneParts) -> Tensor:
    """Tensors merged, of which the user named dimension `dim`, or none."""
    first, rows, given = values[0], parts.rows, _Given.of(parts.plan)
    if first.dim() == 0:
        raise cannot(path, "has no dimensions (a loss?)", DeclineReason.ZERO_DIM_OUTPUT)
    if all(_overlap(value, first) for value in values[1:]):
        views = {(value.data_ptr(), value.shape, value.stride()) for value in values}
        if len(views) == 1 and not given.follow([first.shape[0]] * len(values), rows):
            return first  # a parameter or buffer handed through
        raise cannot(path, "is the same memory in all lanes, which overwrite each other (return a new tensor)")
    sizes = sizes_of(values, dim or 0)
    if not (given.follow(sizes, rows) if dim is None else _proportional(sizes, rows)):
        raise mismatch(path, values, f"in lanes of {list(rows)} rows")
    if dim is None and given.allow_two_readings(first.shape, rows):
        raise cannot(path, f"has shape {tuple(first.shape)} for {rows[0]} rows, along either dimension")
    return torch.cat(list(values), dim or 0)


class _Given(NamedTuple):
    """What the arguments that were cut tell about the outputs.

    Attributes:
        multiples: the batch dimension of an output may be the rows times one of these: 1, or a size beside the rows.
        batch_first: whether dimension 0 is the batch in all of them.
    """

    multiples: frozenset[int]
    batch_first: bool

    @classmethod
    def of(cls, plan: CallPlan) -> _Given:
        cut = [(leaf.value, leaf.dim) for leaf in plan.leaves if leaf.dim is not None]
        tables = [(value.shape, dim) for value, dim in cut if isinstance(value, Tensor) and value.dim() > 1]
        return cls(
            frozenset({1, *(shape[1 - dim] for shape, dim in tables if dim < 2)}), all(dim == 0 for _, dim in cut)
        )

    def follow(self, sizes: Sequence[int], rows: Sequence[int]) -> bool:
        """Whether these sizes are of the batch dimension. Between equal lanes any size is proportional to the rows, so
        it must be a known multiple of them."""
        return any(list(sizes) == [own * multiple for own in rows] for multiple in self.multiples)

    def allow_two_readings(self, shape: Sequence[int], rows: Sequence[int]) -> bool:
        """Whether an output of this shape could be batch-first or of another layout, such as an RNN's `[layers, batch,
        hidden]`. Only equal lanes with as many rows as there are layers leave that open; and not if the arguments are
        batch-first and a later size of the output is one of theirs, such as the length of the sequence."""
        if len(set(rows)) > 1 or len(shape) < (3 if self.batch_first else 2) or not shape[0] == shape[1] == rows[0]:
            return False
        return not self.batch_first or (self.multiples - {1}).isdisjoint(shape[1:])


def _proportional(sizes: Sequence[int], rows: Sequence[int]) -> bool:
    """Whether these sizes, of a dimension that the user named, have the proportion of the lanes' rows."""
    total = sum(sizes)
    return len(sizes) > 0 and all(size * sum(rows) == total * own for size, own in zip(sizes, rows, strict=True))


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the memory spans (first to last byte) of two tensors overlap."""
    if not a.numel() or not b.numel() or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    return a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def _end(value: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr() + (last + 1) * value.element_size()
