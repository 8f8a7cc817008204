"""Cutting a call's arguments into lanes, and putting the lanes' outputs together.

Arguments are split by *parameter name*, never because a size happens to match:

    tensor    its name (or path) in `split_dims`, else in the table of well-known names, else, if it is the call's
              only tensor, along dimension 0; anything else is ambiguous
    cache     through its registered splitter
    tuple, list, dict, dataclass      leaf by leaf
    number, string, None, dtype, ...  the same for every lane

What cannot be split is reported with a reason and a sentence, and nothing has run yet. Outputs are concatenated by
the same walk in the other direction, along a dimension that `output_dims` names or that is the call's rows or tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ubatch.caches import CacheSplitter, splitter_for
from ubatch.errors import ConfigError, SplitError, nearest
from ubatch.vote import DeclineReason

__all__ = [
    "CallPlan",
    "CannotSplit",
    "check_split_dims",
    "even_bounds",
    "merge_outputs",
    "parameter_names",
    "plan_call",
]

_BATCH_FIRST = frozenset(
    """
    attention_mask features hidden_states input input_embeds input_ids input_tokens inputs inputs_embeds labels
    position_ids positions residual src tgt token_ids token_type_ids tokens x
    """.split()
)
_SAME_FOR_ALL = frozenset({"cache_position", "logits_to_keep"})
_TOKEN_IDS = ("input_ids", "token_ids", "tokens", "input_tokens", "inputs_embeds", "input_embeds")
_MAY_BROADCAST = frozenset({"attention_mask", "position_ids", "positions"})
_POSITIONS = frozenset({"position_ids", "positions"})
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, type, Enum)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


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
            parts = self.splitter.split(self.value, bounds)
            if len(parts) != len(bounds):
                raise SplitError(f"its splitter made {len(parts)} parts for {len(bounds)} lanes.")
            return parts
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
        multiples: rows of output that may stand for one row of the call: 1, or what a row of an argument holds.
        args, kwargs: the call, every positional argument with its parameter's name.
    """

    leaves: tuple[_Leaf, ...]
    rows: int
    tokens_per_row: int
    decode: bool
    multiples: frozenset[int]
    args: tuple[tuple[str, Any], ...]
    kwargs: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole call."""
        return self.rows * self.tokens_per_row

    def cut(self, bounds: Sequence[slice]) -> tuple[list[tuple[tuple[Any, ...], dict[str, Any]]], _CacheParts]:
        """Every lane's arguments, and the caches that must be merged afterwards.

        Raises:
            CannotSplit: a cache, or a container of an unusual class, cannot be taken apart.
        """
        parts: dict[str, list[Any]] = {}
        for leaf in self.leaves:
            try:
                parts[leaf.path] = leaf.cut(bounds)
            except SplitError as error:
                raise CannotSplit(DeclineReason.NO_SPLITTER, f"argument {leaf.path!r}: {error}") from error
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
    picked = [_pick(f"{path}.{key}", child, parts) for key, child in children]
    if all(own is child for own, (_, child) in zip(picked, children, strict=True)):
        return value  # nothing in it is split: every lane gets the caller's own object
    try:
        return _rebuild(value, picked)
    except (TypeError, ValueError) as error:
        raise CannotSplit(
            DeclineReason.NO_SPLITTER,
            f"argument {path!r} is a {type(value).__name__}, which cannot be made anew from its items ({error}). "
            "Use ubatch.register_splitter.",
        ) from error


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


def check_split_dims(forward: Callable[..., Any], split_dims: Mapping[str, int | None]) -> None:
    """Refuse a name in `split_dims` that is no parameter of `forward`, where `forward` takes no others.

    Raises:
        ConfigError: with the nearest name.
    """
    parameters = inspect.signature(forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for path in split_dims:
        name = path.partition(".")[0]
        if name not in parameters:
            raise ConfigError(f"split_dims names {name!r}, which forward() does not take{nearest(name, parameters)}")


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
    dim, known = _lookup(path, value, split_dims)
    if isinstance(value, (*_PLAIN, *_FUNCTIONS)):
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


def _lookup(path: str, value: Any, split_dims: Mapping[str, int | None]) -> tuple[int | None, bool]:
    """The dimension for `path`: the longest prefix that the user named, else the well-known names."""
    prefix = path
    while prefix:
        if prefix in split_dims:
            return split_dims[prefix], True
        prefix = prefix.rpartition(".")[0]
    name = path.rpartition(".")[2]
    if name in _POSITIONS and isinstance(value, Tensor) and value.dim() > 2:
        return None, False  # multimodal rope has [3, B, S]
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
    per_row = _tokens_per_row(settled)
    multiples = {_other_size(leaf) for leaf in settled if isinstance(leaf.value, Tensor) and leaf.value.dim() > 1}
    return CallPlan(
        leaves=tuple(settled),
        rows=rows,
        tokens_per_row=1 if per_row is None else per_row,
        decode=per_row == 1,
        multiples=frozenset({1, *multiples} - {None}),
        args=args,
        kwargs=kwargs,
    )


def _tokens_per_row(leaves: Sequence[_Leaf]) -> int | None:
    """S of the call's token ids `[B, S]` or embeddings `[B, S, hidden]`; None where it has neither."""
    for name in _TOKEN_IDS:
        for leaf in leaves:
            if leaf.path.rpartition(".")[2] == name and isinstance(leaf.value, Tensor) and leaf.dim is not None:
                token_dims = leaf.value.dim() - leaf.value.is_floating_point()
                return _other_size(leaf) if token_dims == 2 else None
    return None


def _other_size(leaf: _Leaf) -> int | None:
    """Where a tensor is split along one of its first two dimensions, the size of the other one."""
    size: int | None = leaf.value.shape[1 - leaf.dim] if leaf.dim in (0, 1) else None
    return size


def _size(leaf: _Leaf) -> int:
    return int(leaf.value.shape[leaf.dim]) if isinstance(leaf.value, Tensor) else len(leaf.value)


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """Named children of a container, None for a leaf."""
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        return [(str(index), child) for index, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
    return None


def _rebuild(value: Any, children: list[Any]) -> Any:
    """A container like `value` with other children."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # ModelOutput is a dataclass *and* a mapping without its unset fields: rebuild it from the fields.
        names = list(value) if isinstance(value, Mapping) else [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(value, **dict(zip(names, children, strict=True)))
    if isinstance(value, MutableMapping):
        clone = copy.copy(value)  # keeps what else it has, such as a defaultdict's factory
        clone.update(zip(value, children, strict=True))
        return clone
    if isinstance(value, Mapping):
        return type(value)(dict(zip(value, children, strict=True)))  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*children)
    return type(value)(children)


def even_bounds(rows: int, lanes: int) -> list[slice]:
    """Row ranges of `lanes` lanes, as equal as can be."""
    edges = [rows * lane // lanes for lane in range(lanes + 1)]
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def merge_outputs(
    outputs: Sequence[Any],
    plan: CallPlan,
    bounds: Sequence[slice],
    caches: _CacheParts,
    output_dims: Mapping[str, int | None],
) -> Any:
    """The lanes' outputs as the unsplit model would have returned them.

    Args:
        outputs: one per lane, of one structure.
        plan: how the arguments were split.
        bounds: the rows of every lane.
        caches: the call's caches; merged in place when everything else could be.
        output_dims: where to concatenate what is not batch-first; None where all lanes return the same.

    Raises:
        CannotSplit: an output has no batch dimension, or not one that follows the rows.
    """
    rows = [part.stop - part.start for part in bounds]
    merged = _Merger(rows, plan.multiples, caches, output_dims).merge("output", outputs)
    caches.merge()
    return merged


@dataclasses.dataclass(frozen=True)
class _Merger:
    """Puts the lanes' values together, leaf by leaf. Attributes as the arguments of `merge_outputs`."""

    rows: Sequence[int]
    multiples: frozenset[int]
    caches: _CacheParts
    dims: Mapping[str, int | None]

    def merge(self, path: str, values: Sequence[Any]) -> Any:
        """One value for the lanes' `values` at `path`."""
        first = values[0]
        dim, named = self._named(path)
        if all(value is first for value in values) or (named and dim is None):
            return first
        if any(type(value) is not type(first) for value in values):
            raise _ambiguous(path, f"is of class {sorted({type(value).__name__ for value in values})} in different lanes")
        if isinstance(first, Tensor):
            return self._concatenate(path, values)
        splitter = splitter_for(first)
        if splitter is not None:
            whole = self.caches.whole_of(first)
            return whole if whole is not None else splitter.merge(values, None)
        columns = [_children(value) for value in values]
        if columns[0] is None:
            if isinstance(first, _PLAIN) and all(value == first for value in values):
                return first
            raise _ambiguous(path, f"is a {type(first).__name__} that differs between lanes")
        if type(first) in (list, tuple) and all(isinstance(value, _PLAIN) for value in itertools.chain(*values)):
            if named:
                return type(first)(itertools.chain(*values))
            if any(value is not None for value in first) and [len(value) for value in values] == list(self.rows):
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
            return _rebuild(values[0], merged)
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
        if all(_is_view_of_same(value, first) for value in values):
            return first  # a parameter or buffer handed through
        dim, named = self._named(path)
        dim = dim or 0
        if any(not -value.dim() <= dim < value.dim() for value in values):
            raise _ambiguous(path, f"has {first.dim()} dimensions, so none is dimension {dim}")
        counts = [value.shape[dim] for value in values]
        others = {value.shape[:dim] + value.shape[dim:][1:] for value in values}
        if len(others) > 1 or not (self._proportional(counts) if named else self._follows_rows(counts)):
            raise _ambiguous(path, f"has shapes {[tuple(value.shape) for value in values]} for {list(self.rows)} rows")
        return torch.cat(list(values), dim)

    def _named(self, path: str) -> tuple[int | None, bool]:
        """The dimension that the user gave for `path`, and whether they did."""
        name = path.removeprefix("output.")
        for known in (name, name.rpartition(".")[2]):
            if known in self.dims:
                return self.dims[known], True
        return None, False

    def _follows_rows(self, counts: Sequence[int]) -> bool:
        """Whether this is the batch dimension. With equal lanes any size would be proportional, so it must be known."""
        return any(list(counts) == [own * multiple for own in self.rows] for multiple in self.multiples)

    def _proportional(self, counts: Sequence[int]) -> bool:
        total, rows = sum(counts), sum(self.rows)
        return all(count * rows == total * own for count, own in zip(counts, self.rows, strict=True))


def _is_view_of_same(a: Tensor, b: Tensor) -> bool:
    return a.numel() > 0 and a.shape == b.shape and a.stride() == b.stride() and a.data_ptr() == b.data_ptr()


def _ambiguous(path: str, what: str) -> CannotSplit:
    return CannotSplit(
        DeclineReason.AMBIGUOUS_OUTPUT,
        f"{path} {what}, so the lanes' outputs cannot be merged. Name its batch dimension in output_dims, or None there "
        "if every lane returns the same.",
    )
