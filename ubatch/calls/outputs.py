"""Merging the lanes' outputs of a call that was not proved.

    tensor    concatenated along the dimension that `output_dims` names, else along dimension 0 if only that one has
              the size of the call's rows or tokens; otherwise it is ambiguous. 0-dim tensors are refused
    cache     the caller's, where it was an argument; else a new one, through its registered splitter
    tuple, list, dict, dataclass      item by item
    number, string, None, ...         kept if equal in all lanes; an int might count a lane's rows, so it must be named

The caller's caches change only after all other outputs have been merged. For a proved call, the proof has learned how
to merge (`ubatch.calls.merging`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ubatch.calls.arguments import longest_named
from ubatch.calls.caches import splitter_for
from ubatch.calls.call_plan import CallPlan, CannotSplit, LaneParts
from ubatch.calls.containers import PLAIN, children_of, rebuild
from ubatch.schedules.vote import DeclineReason

__all__ = ["merge_outputs", "named_dim"]


def merge_outputs(
    outputs: Sequence[Any], plan: CallPlan, parts: LaneParts, output_dims: Mapping[str, int | None]
) -> Any:
    """Merge the lanes' outputs into what the unsplit model would have returned.

    Args:
        outputs: one per lane, of one structure.
        parts: the lanes' parts of the arguments; their caches are merged in place after all other outputs.
        output_dims: output -> dimension to concatenate, if it is not 0; None if all lanes return the same value.

    Raises:
        CannotSplit: an output has no batch dimension, or its size does not follow the number of rows.
    """
    merged = _Merger(plan, parts, output_dims).merge("output", outputs)
    parts.merge_caches()
    return merged


def named_dim(path: str, dims: Mapping[str, int | None]) -> tuple[int | None, bool]:
    """The dimension that the user named for the output at `path` or for a container of it, and whether one was
    named."""
    name = path.removeprefix("output.")
    nameless = name.replace(".", "").isdigit()
    for known in (longest_named(name, dims), "output" if nameless else name.rpartition(".")[2]):
        if known is not None and known in dims:
            return dims[known], True
    return None, False


@dataclass(frozen=True)
class _Merger:
    """Merges the lanes' values, leaf by leaf. For the attributes see the arguments of `merge_outputs`."""

    plan: CallPlan
    parts: LaneParts
    dims: Mapping[str, int | None]

    def merge(self, path: str, values: Sequence[Any]) -> Any:
        """One value for the lanes' `values` at `path`."""
        first = values[0]
        dim, named = named_dim(path, self.dims)
        if named and dim is None:
            return first
        if any(type(value) is int for value in values):
            raise _ambiguous(path, "is an int, which may count a lane's rows")
        if all(value is first for value in values):
            return first
        if any(type(value) is not type(first) for value in values):
            kinds = sorted({type(value).__name__ for value in values})
            raise _ambiguous(path, f"is a {' or a '.join(kinds)}, depending on the lane")
        if isinstance(first, Tensor):
            return self._concatenate(path, values)
        splitter = splitter_for(first)
        if splitter is not None:
            whole = self.parts.cache_of(first)
            return whole if whole is not None else splitter.merge(values, None)
        columns = [children_of(value) for value in values]
        if columns[0] is None:
            if isinstance(first, PLAIN) and all(value == first for value in values):
                return first
            raise _ambiguous(path, f"is a {type(first).__name__} that differs between lanes")
        if type(first) in (list, tuple) and all(isinstance(value, PLAIN) for value in itertools.chain(*values)):
            if named:
                return type(first)(itertools.chain(*values))
            if any(value is not None for value in first) and [len(value) for value in values] == list(self.parts.rows):
                raise _ambiguous(path, f"is a {type(first).__name__} of plain values, maybe one per row")
        return self._merge_children(path, values, [column or [] for column in columns])

    def _merge_children(self, path: str, values: Sequence[Any], columns: Sequence[list[tuple[str, Any]]]) -> Any:
        keys = [key for key, _ in columns[0]]
        if any([key for key, _ in column] != keys for column in columns):
            raise _ambiguous(path, "has different keys or lengths in different lanes")
        merged = [
            self.merge(f"{path}.{key}", [column[index][1] for column in columns]) for index, key in enumerate(keys)
        ]
        try:
            return rebuild(values[0], merged)
        except (TypeError, ValueError) as error:
            what = f"is a {type(values[0]).__name__}, which cannot be made anew from its items ({error})"
            raise _ambiguous(path, what) from error

    def _concatenate(self, path: str, values: Sequence[Tensor]) -> Tensor:
        first = values[0]
        if first.dim() == 0:
            raise CannotSplit(
                DeclineReason.ZERO_DIM_OUTPUT,
                f"{path} has no dimensions (a loss?), so the lanes' values cannot be concatenated. "
                "Compute it outside the wrapped module.",
            )
        dim, named = named_dim(path, self.dims)
        if all(_overlap(value, first) for value in values[1:]):
            if all(_is_same_view(value, first) for value in values) and not self._follows_rows(
                [value.shape[0] for value in values]
            ):
                return first  # a parameter or buffer handed through
            raise CannotSplit(
                DeclineReason.CANNOT_MERGE,
                f"{path} is the same memory in all lanes, so one has overwritten the other's. Return a new tensor.",
            )
        dim = dim or 0
        if any(not -value.dim() <= dim < value.dim() for value in values):
            raise _ambiguous(path, f"has {first.dim()} dimensions, so none is dimension {dim}")
        counts = [value.shape[dim] for value in values]
        others = {value.shape[:dim] + value.shape[dim:][1:] for value in values}
        if len(others) > 1 or not (self._proportional(counts) if named else self._follows_rows(counts)):
            raise _ambiguous(
                path, f"has shapes {[tuple(value.shape) for value in values]} for {list(self.parts.rows)} rows"
            )
        if not named and self._has_two_readings(first):
            raise _ambiguous(path, f"has shape {tuple(first.shape)} for {self.parts.rows[0]} rows, which may be either")
        return torch.cat(list(values), dim)

    def _follows_rows(self, counts: Sequence[int]) -> bool:
        """Whether these sizes are of the batch dimension. Between equal lanes any size is proportional to the rows, so
        there the size must be a known multiple of them."""
        return any(list(counts) == [own * multiple for own in self.parts.rows] for multiple in self.plan.multiples)

    def _has_two_readings(self, value: Tensor) -> bool:
        """Whether this could be a batch-first output or another layout, such as an RNN's `[layers, batch, hidden]`.

        Only possible with equal lanes that have as many rows as there are layers. If the arguments are batch-first and
        a later size of the output is one of theirs, such as the sequence length, it is batch-first.
        """
        if len(set(self.parts.rows)) > 1 or value.dim() < (3 if self.plan.batch_first else 2):
            return False
        first, second = value.shape[:2]
        told = self.plan.batch_first and not (self.plan.multiples - {1}).isdisjoint(value.shape[1:])
        return first == second == self.parts.rows[0] and not told

    def _proportional(self, counts: Sequence[int]) -> bool:
        total, rows = sum(counts), sum(self.parts.rows)
        return all(count * rows == total * own for count, own in zip(counts, self.parts.rows, strict=True))


def _is_same_view(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.data_ptr() == b.data_ptr()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the memory spans (first to last byte) of two tensors overlap."""
    if not a.numel() or not b.numel() or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    return a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def _end(value: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr() + (last + 1) * value.element_size()


def _ambiguous(path: str, what: str) -> CannotSplit:
    return CannotSplit(
        DeclineReason.CANNOT_MERGE,
        f"{path} {what}, so the lanes' outputs cannot be merged. Name its batch dimension in output_dims, or None "
        "there if every lane returns the same.",
    )
