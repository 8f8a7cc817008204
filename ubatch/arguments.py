"""Cutting a call's arguments into lanes, and putting the lanes' outputs together.

Arguments are split by *parameter name*, never because a size happens to match:

    tensor    its name (or path) in `split_dims`, else in the table of well-known names, else, if it is the call's
              only tensor, along dimension 0; anything else is ambiguous
    cache     through its registered splitter
    tuple, list, dict, dataclass      leaf by leaf
    number, string, None, dtype, ...  the same for every lane

What cannot be split is reported with a reason and a sentence, and nothing has run yet. Outputs are concatenated by
the same walk in the other direction.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ubatch.caches import CacheSplitter, splitter_for
from ubatch.errors import SplitError
from ubatch.vote import DeclineReason

__all__ = ["CallPlan", "CannotSplit", "even_bounds", "merge_outputs", "parameter_names", "plan_call"]

_BATCH_FIRST = frozenset(
    """
    attention_mask features hidden_states input input_embeds input_ids input_tokens inputs inputs_embeds labels
    position_ids positions residual src tgt token_ids token_type_ids tokens x
    """.split()
)
_SAME_FOR_ALL = frozenset({"cache_position", "logits_to_keep"})
_TOKEN_IDS = ("input_ids", "token_ids", "tokens", "input_tokens", "inputs_embeds", "input_embeds")
_MAY_BROADCAST = frozenset({"attention_mask", "position_ids", "positions"})
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, type, Enum)


class CannotSplit(SplitError):
    """Why a call runs unsplit; `reason` is counted."""

    def __init__(self, reason: DeclineReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One tensor, list or cache of the call.

    Attributes:
        path: `name`, or `name.key` inside a nested argument.
        value: the whole.
        dim: where to cut it; None gives every lane the whole.
        splitter: for caches.
    """

    path: str
    value: Any
    dim: int | None
    splitter: CacheSplitter | None = None

    def cut(self, bounds: Sequence[slice]) -> list[Any]:
        if self.splitter is not None:
            return self.splitter.split(self.value, bounds)
        if self.dim is None:
            return [self.value] * len(bounds)
        if isinstance(self.value, Tensor):
            return [self.value.narrow(self.dim, rows.start, rows.stop - rows.start) for rows in bounds]
        return [self.value[rows] for rows in bounds]


@dataclasses.dataclass(frozen=True)
class CallPlan:
    """How one call is split.

    Attributes:
        leaves: what varies between lanes, and what would, were it not shared.
        rows: size of the split dimension.
        tokens_per_row: tokens that one row stands for: S for token ids `[B, S]`, else 1.
        decode: whether every row has one token of a token-ids argument of two dimensions.
        args, kwargs: the call, every positional argument with its parameter's name.
    """

    leaves: tuple[_Leaf, ...]
    rows: int
    tokens_per_row: int
    decode: bool
    args: tuple[tuple[str, Any], ...]
    kwargs: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole call."""
        return self.rows * self.tokens_per_row

    def cut(self, bounds: Sequence[slice]) -> tuple[list[tuple[tuple[Any, ...], dict[str, Any]]], _CacheParts]:
        """Every lane's arguments, and the caches that must be merged afterwards."""
        parts = {leaf.path: leaf.cut(bounds) for leaf in self.leaves}
        caches = _CacheParts(
            [(leaf.splitter, leaf.value, parts[leaf.path]) for leaf in self.leaves if leaf.splitter is not None]
        )
        calls = []
        for lane in range(len(bounds)):
            own = {path: lanes[lane] for path, lanes in parts.items()}
            calls.append(
                (
                    tuple(_pick(name, value, own) for name, value in self.args),
                    {name: _pick(name, value, own) for name, value in self.kwargs.items()},
                )
            )
        return calls, caches


def _pick(path: str, value: Any, parts: Mapping[str, Any]) -> Any:
    """An argument with its split leaves replaced by one lane's parts."""
    if path in parts:
        return parts[path]
    children = _children(value)
    if not children:
        return value
    return _rebuild(value, [_pick(f"{path}.{key}", child, parts) for key, child in children])


class _CacheParts:
    """The caches of a call, with the parts that the lanes changed."""

    def __init__(self, caches: Sequence[tuple[CacheSplitter, Any, Sequence[Any]]]) -> None:
        self._caches = caches

    def whole_of(self, part: object) -> Any | None:
        """The cache that `part` was cut from, or None."""
        for _, whole, parts in self._caches:
            if any(part is own for own in parts):
                return whole
        return None

    def merge(self) -> None:
        """Put what the lanes wrote into the caller's caches."""
        for splitter, whole, parts in self._caches:
            splitter.merge(parts, whole)


def parameter_names(forward: Callable[..., Any]) -> tuple[tuple[str, ...], str | None]:
    """Names of a forward's positional parameters, and of its `*args` if it has them."""
    positional: list[str] = []
    rest: str | None = None
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            rest = parameter.name
    return tuple(positional), rest


def plan_call(
    names: tuple[tuple[str, ...], str | None],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    split_dims: Mapping[str, int | None],
) -> CallPlan:
    """How to split this call.

    Raises:
        CannotSplit: with the counted reason and a sentence that names the argument and says what to do.
    """
    positional, rest = names
    named = tuple(
        (positional[index] if index < len(positional) else f"{rest or 'args'}.{index - len(positional)}", value)
        for index, value in enumerate(args)
    )
    found = [leaf for name, value in (*named, *kwargs.items()) for leaf in _find(name, value, split_dims)]
    tensors = [path for path, value, _, _ in found if isinstance(value, Tensor) and value.dim() > 0]
    leaves: list[_Leaf] = []
    for path, value, dim, known in found:
        splitter = None if known and dim is None else splitter_for(value)
        if splitter is not None:
            leaves.append(_Leaf(path, value, None, splitter))
        elif known:
            leaves.append(_checked(path, value, dim))
        elif isinstance(value, Tensor):
            if value.dim() == 0:
                continue
            if len(tensors) > 1:
                raise CannotSplit(
                    DeclineReason.AMBIGUOUS_ARGUMENT,
                    f"argument {path!r} is a tensor of shape {tuple(value.shape)} whose batch dimension is not known. "
                    f"Say it: split_dims={{{path!r}: 0}}, or None to give every lane the whole of it.",
                )
            leaves.append(_Leaf(path, value, 0))
        elif isinstance(value, list | tuple):
            raise CannotSplit(
                DeclineReason.AMBIGUOUS_ARGUMENT,
                f"argument {path!r} is a {type(value).__name__} of {len(value)} values, one per row or the same for all? "
                f"Say it: split_dims={{{path!r}: 0}} or {{{path!r}: None}}.",
            )
        else:
            raise CannotSplit(
                DeclineReason.NO_SPLITTER,
                f"argument {path!r} is a {type(value).__name__}, which nobody registered a splitter for. "
                f"Use ubatch.register_splitter, or split_dims={{{path!r}: None}} if every lane may share it.",
            )
    return _with_rows(leaves, named, kwargs)


def _find(path: str, value: Any, split_dims: Mapping[str, int | None]) -> Iterator[tuple[str, Any, int | None, bool]]:
    """Leaves that matter: `(path, value, dim, known)`."""
    dim, known = _lookup(path, split_dims)
    if isinstance(value, _PLAIN) or (callable(value) and not isinstance(value, torch.nn.Module)):
        return
    if isinstance(value, Tensor) or splitter_for(value) is not None:
        yield path, value, dim, known
        return
    children = _children(value)
    if children is None:
        if not known or dim is not None:
            yield path, value, dim, False
        return
    if children and isinstance(value, list | tuple) and all(isinstance(child, _PLAIN) for _, child in children):
        if not all(child is None for _, child in children):
            yield path, value, dim, known
        return
    for key, child in children:
        yield from _find(f"{path}.{key}", child, split_dims)


def _lookup(path: str, split_dims: Mapping[str, int | None]) -> tuple[int | None, bool]:
    """The dimension for `path`: the longest prefix that the user named, else the well-known names."""
    prefix = path
    while prefix:
        if prefix in split_dims:
            return split_dims[prefix], True
        prefix = prefix.rpartition(".")[0]
    name = path.rpartition(".")[2]
    if name in _BATCH_FIRST:
        return 0, True
    return None, name in _SAME_FOR_ALL


def _checked(path: str, value: Any, dim: int | None) -> _Leaf:
    if dim is None:
        return _Leaf(path, value, None)
    dims = value.dim() if isinstance(value, Tensor) else 1
    if not -dims <= dim < dims:
        raise CannotSplit(
            DeclineReason.AMBIGUOUS_ARGUMENT,
            f"argument {path!r} has {dims} dimensions, so it cannot be split along dimension {dim}. Mend split_dims.",
        )
    return _Leaf(path, value, dim % dims)


def _with_rows(leaves: list[_Leaf], args: tuple[tuple[str, Any], ...], kwargs: Mapping[str, Any]) -> CallPlan:
    """Check that all split leaves agree on the number of rows; size 1 broadcasts where the field's names do."""
    sizes = {leaf.path: _size(leaf) for leaf in leaves if leaf.dim is not None}
    if not sizes:
        raise CannotSplit(DeclineReason.NO_BATCH, "the call has no tensor argument to split. Name one in split_dims.")
    rows = max(sizes.values())
    settled = []
    for leaf in leaves:
        size = sizes.get(leaf.path, rows)
        if size == 1 and rows > 1 and leaf.path.rpartition(".")[2] in _MAY_BROADCAST:
            leaf = dataclasses.replace(leaf, dim=None)
        elif size != rows:
            raise CannotSplit(
                DeclineReason.AMBIGUOUS_ARGUMENT,
                f"argument {leaf.path!r} has {size} rows where others have {rows}. Mend split_dims or the batch.",
            )
        settled.append(leaf)
    ids = next(
        (leaf.value for name in _TOKEN_IDS for leaf in settled if leaf.path == name and isinstance(leaf.value, Tensor)),
        None,
    )
    embedded = ids is not None and ids.is_floating_point()
    per_row = ids.shape[1] if ids is not None and ids.dim() == (3 if embedded else 2) else None
    return CallPlan(tuple(settled), rows, 1 if per_row is None else per_row, per_row == 1, args, kwargs)


def _size(leaf: _Leaf) -> int:
    return leaf.value.shape[leaf.dim] if isinstance(leaf.value, Tensor) else len(leaf.value)


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """Named children of a container, None for a leaf."""
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        return [(str(index), child) for index, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def _rebuild(value: Any, children: list[Any]) -> Any:
    """A container like `value` with other children."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # ModelOutput is a dataclass *and* a mapping without its unset fields: rebuild it from the fields.
        names = list(value) if isinstance(value, Mapping) else [f.name for f in dataclasses.fields(value)]
        return dataclasses.replace(value, **dict(zip(names, children, strict=True)))
    if isinstance(value, Mapping):
        return type(value)(zip(value, children, strict=True))  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*children)
    return type(value)(children)


def even_bounds(rows: int, lanes: int) -> list[slice]:
    """Row ranges of `lanes` lanes, as equal as can be."""
    edges = [rows * lane // lanes for lane in range(lanes + 1)]
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def merge_outputs(
    outputs: Sequence[Any], rows: Sequence[int], caches: _CacheParts, output_dims: Mapping[str, int]
) -> Any:
    """The lanes' outputs as the unsplit model would have returned them.

    Args:
        outputs: one per lane, of one structure.
        rows: how many rows each lane had.
        caches: the call's caches; merged in place when everything else could be.
        output_dims: where to concatenate what is not batch-first.

    Raises:
        CannotSplit: an output has no batch dimension, or not one that follows the rows.
    """
    merged = _merge("output", outputs, rows, caches, output_dims)
    caches.merge()
    return merged


def _merge(path: str, values: Sequence[Any], rows: Sequence[int], caches: _CacheParts, dims: Mapping[str, int]) -> Any:
    first = values[0]
    if all(value is first for value in values):
        return first
    if any(type(value) is not type(first) for value in values):
        raise _ambiguous(path, f"is of class {sorted({type(value).__name__ for value in values})} in different lanes")
    if isinstance(first, Tensor):
        return _concatenate(path, values, rows, dims)
    splitter = splitter_for(first)
    if splitter is not None:
        whole = caches.whole_of(first)
        return whole if whole is not None else splitter.merge(values, None)
    children = _children(first)
    if children is None:
        if isinstance(first, _PLAIN) and all(value == first for value in values):
            return first
        raise _ambiguous(path, f"is a {type(first).__name__} that differs between lanes")
    keys = [key for key, _ in children]
    columns = [_children(value) or [] for value in values]
    if any([key for key, _ in column] != keys for column in columns):
        raise _ambiguous(path, "has different keys or lengths in different lanes")
    merged = [
        _merge(f"{path}.{key}", [column[index][1] for column in columns], rows, caches, dims)
        for index, key in enumerate(keys)
    ]
    return _rebuild(first, merged)


def _concatenate(path: str, values: Sequence[Tensor], rows: Sequence[int], dims: Mapping[str, int]) -> Tensor:
    first = values[0]
    if first.dim() == 0:
        raise CannotSplit(
            DeclineReason.ZERO_DIM_OUTPUT,
            f"{path} has no dimensions (a loss?), so the lanes' values cannot be concatenated. "
            "Compute it outside the wrapped module.",
        )
    if all(value.data_ptr() == first.data_ptr() and value.stride() == first.stride() for value in values) and (
        first.numel() and all(value.shape == first.shape for value in values)
    ):
        return first  # a parameter or buffer handed through
    name = path.removeprefix("output.")
    dim = dims.get(name, dims.get(name.rpartition(".")[2], 0))
    counts = [value.shape[dim] for value in values]
    total, total_rows = sum(counts), sum(rows)
    others = {value.shape[:dim] + value.shape[dim:][1:] for value in values}
    if len(others) > 1 or any(count * total_rows != total * own for count, own in zip(counts, rows, strict=True)):
        raise _ambiguous(path, f"has shapes {[tuple(value.shape) for value in values]} for {list(rows)} rows")
    return torch.cat(list(values), dim)


def _ambiguous(path: str, what: str) -> CannotSplit:
    return CannotSplit(
        DeclineReason.AMBIGUOUS_OUTPUT,
        f"{path} {what}, so the lanes' outputs cannot be merged. Name its batch dimension in output_dims.",
    )
