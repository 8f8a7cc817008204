"""A call as named leaves, and how it is split into lanes: every lane's arguments, and the merging of its caches.

`ubatch.calls.arguments` finds the leaves and decides along which dimension each is split.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ubatch.calls.caches import CacheSplitter, splitter_for
from ubatch.calls.containers import LEAF_CLASSES, PLAIN, attributes_of, children_of, rebuild, tensors_in
from ubatch.errors import ConfigError, SplitError
from ubatch.schedules.vote import DeclineReason

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""
_Names = tuple[tuple[str, ...], str | None]


class CannotSplit(SplitError):
    """The call cannot be split, so it runs unsplit; `reason` is counted in the statistics."""

    def __init__(self, reason: DeclineReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Leaf(NamedTuple):
    """One tensor, list or cache of the call.

    Attributes:
        path: `name`, or `name.key` inside a nested argument.
        value: the caller's value, unsplit.
        dim: the dimension to split; None gives every lane the whole value.
    """

    path: str
    value: Any
    dim: int | None
    splitter: CacheSplitter | None = None

    def sizes_beside(self) -> set[int]:
        """Its sizes, without the size of the split dimension."""
        if isinstance(self.value, Tensor):
            return {size for at, size in enumerate(self.value.shape) if at != self.dim}
        if self.splitter is not None:
            return {size for tensor in tensors_in(self.value) for size in tensor.shape}
        return set() if self.dim is not None or not isinstance(self.value, list | tuple) else {len(self.value)}

    def cut(self, bounds: Sequence[slice], sizes: Sequence[int] | None) -> Sequence[Any]:
        """One part per lane, for lanes with these row ranges.

        Args:
            sizes: the lanes' numbers of rows, if one operator may make the parts of all lanes.

        Raises:
            CannotSplit: it cannot be cut.
        """
        path, value, dim, splitter = self
        if splitter is not None:
            try:
                parts = splitter.split(value, bounds)
                if len(parts) != len(bounds):
                    raise SplitError(f"its splitter made {len(parts)} parts for {len(bounds)} lanes.")
            except SplitError as error:
                raise CannotSplit(DeclineReason.NO_SPLITTER, f"argument {path!r}: {error}") from error
            return parts
        if dim is None:
            return [value] * len(bounds)
        is_plain = type(value) is Tensor and not value.__dict__
        if is_plain and sizes is not None:
            return list(value.split_with_sizes(sizes, dim))
        if dim == 0 and (is_plain or not isinstance(value, Tensor)):
            return [value[rows] for rows in bounds]
        try:
            return [_like(value.narrow(dim, rows.start, rows.stop - rows.start), value) for rows in bounds]
        except TypeError as error:
            what = f"argument {path!r} is a {type(value).__name__} that cannot be cut into rows ({error})."
            raise CannotSplit(DeclineReason.TENSOR_LAYOUT, what) from error

    def copied(self, order: Sequence[int] | None, rows: int) -> Any:
        """A copy of the value, for lanes that must not write to the caller's own.

        Args:
            order: see `CallPlan.copied`.
            rows: number of rows of the call.
        """
        _, value, dim, splitter = self
        if dim is None and splitter is None:
            order = None
        if isinstance(value, Tensor):
            return _copy_tensor(value, dim, order)
        if order is None:
            kept = splitter is None and not isinstance(value, list | tuple) and not any(True for _ in tensors_in(value))
            return value if kept else _copy_object(value)
        if splitter is None:
            return type(value)(value[row] for row in order)
        single = splitter.split(_copy_object(value), [slice(row, row + 1) for row in range(rows)])
        return splitter.merge([_copy_object(single[row]) for row in order], None)


class CallPlan(NamedTuple):
    """How one call is split.

    Attributes:
        leaves: tensors, lists and caches of the call, both split and shared ones.
        rows: size of the split dimension.
        tokens_per_row: tokens per row: S for token ids `[B, S]`, else 1.
        decode: whether every row has one token of a token-ids argument of two dimensions.
        named: the call's arguments with their parameters' names.
        positional: how many of them are positional; the others are keyword arguments.
    """

    leaves: tuple[Leaf, ...]
    rows: int
    tokens_per_row: int
    decode: bool
    named: tuple[tuple[str, Any], ...]
    positional: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole call."""
        return self.rows * self.tokens_per_row

    def refuse_shared_memory(self) -> None:
        """Refuse a call that writes to arguments of which two share one storage; `CannotSplit` if they do."""
        values = (leaf.value for leaf in self.leaves)
        different = {id(value): value for value in values if isinstance(value, Tensor) and value.numel()}
        storages = [value.untyped_storage().data_ptr() for value in different.values()]
        if len(set(storages)) < len(storages):
            why = "the call writes to arguments that share memory with each other. Give it tensors of their own."
            raise CannotSplit(DeclineReason.CANNOT_PROVE, why)

    def copied(self, order: Sequence[int] | None) -> CallPlan:
        """The same call with copies of everything that lanes could write to; `CannotSplit` if one has no copy.

        Args:
            order: row numbers of this call, in the order that the copies have them; None copies all rows in order.
        """
        made: dict[tuple[int, int | None], Any] = {}
        leaves = []
        for leaf in self.leaves:
            try:
                key = id(leaf.value), leaf.dim  # what occurs twice is copied once
                made[key] = made[key] if key in made else leaf.copied(order, self.rows)
                leaves.append(leaf._replace(value=made[key]))
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                what = f"argument {leaf.path!r} is a {type(leaf.value).__name__} that cannot be copied ({error}), so "
                what += 'overlap cannot be proved. Set verify="off" if the module\'s rows do not depend on each other.'
                raise CannotSplit(DeclineReason.CANNOT_PROVE, what) from error
        ((args, kwargs),) = self._calls({leaf.path: [leaf.value] for leaf in leaves}, 1)
        names, rows = [name for name, _ in self.named], self.rows if order is None else len(order)
        named = zip(names, (*args, *kwargs.values()), strict=True)
        return self._replace(leaves=tuple(leaves), rows=rows, named=tuple(named))

    def cut(self, bounds: Sequence[slice]) -> tuple[list[Call], LaneParts]:
        """Every lane's arguments, and the lanes' parts of each leaf.

        Raises:
            CannotSplit: a cache cannot be split, or a container cannot be rebuilt from its items.
        """
        sizes = [rows.stop - rows.start for rows in bounds]
        # Autograd refuses writes to views that one operator made together.
        together = None if sum(sizes) != self.rows or torch.is_grad_enabled() else sizes
        parts = {leaf.path: leaf.cut(bounds, together) for leaf in self.leaves}
        return self._calls(parts, len(bounds)), LaneParts(self, parts, sizes)

    def _calls(self, parts: Mapping[str, Sequence[Any]], lanes: int) -> list[Call]:
        """Every lane's arguments, from its parts of the leaves."""
        try:
            return _calls_from(self.named, self.positional, parts, lanes)
        except SplitError as error:
            raise CannotSplit(DeclineReason.NO_SPLITTER, f"{error}. Use ubatch.register_splitter.") from error


class LaneParts(NamedTuple):
    """The lanes' parts of a call's leaves.

    Attributes:
        parts: path of a leaf -> its parts, one per lane.
        rows: number of rows of each lane.
    """

    plan: CallPlan
    parts: Mapping[str, Sequence[Any]]
    rows: Sequence[int]

    def cache_of(self, part: object) -> Any | None:
        """The cache that `part` was cut from, or None."""
        caches = (leaf for leaf in self.plan.leaves if leaf.splitter is not None)
        return next((leaf.value for leaf in caches if any(part is own for own in self.parts[leaf.path])), None)

    def merge_caches(self) -> None:
        """Put what the lanes wrote into the caller's caches."""
        for leaf in self.plan.leaves:
            if leaf.splitter is not None:
                merge_cache(leaf.splitter, self.parts[leaf.path], leaf.value)


def merge_cache(splitter: CacheSplitter, parts: Sequence[Any], whole: Any | None) -> Any:
    """Merge the lanes' parts of a cache, into `whole` if there is one; `CannotSplit` where that fails."""
    try:
        return splitter.merge(parts, whole)
    except SplitError as error:
        what = f"the lanes' parts of a {type(parts[0]).__name__} cannot be merged: {error}"
        raise CannotSplit(DeclineReason.CANNOT_MERGE, what) from error


def even_bounds(rows: int, lanes: int) -> list[slice]:
    """Row ranges of `lanes` lanes; their lengths differ by at most one."""
    edges = [rows * lane // lanes for lane in range(lanes + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def _like(part: Tensor, whole: Tensor) -> Tensor:
    """`part`, which was cut or copied from `whole`, with the plain ones of its attributes.

    Raises:
        TypeError: it is of another class. A tensor stands for a parameter.
    """
    if type(part) is not type(whole) and type(whole) is not Parameter:
        raise TypeError(f"a part of it is a {type(part).__name__}")
    if whole.__dict__:
        part.__dict__.update((name, own) for name, own in attributes_of(whole).items() if isinstance(own, PLAIN))
    return part


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
    return _like(made if in_graph else made.requires_grad_(value.requires_grad), value)


# ---------------------------------------------------------------------------------------------- a call as named leaves


@dataclass(frozen=True)
class CallLeaves:
    """A call's leaves by path. Arguments that are None are left out, as if they were not given.

    Attributes:
        tensors: by path: the parameter's name, or `name.key` inside a nested argument.
        others: everything else, by path.
    """

    tensors: Mapping[str, Tensor]
    others: Mapping[str, Any]


def leaves_of(names: _Names, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallLeaves:
    """Take a call apart.

    Args:
        names: the forward's positional parameters; see `ubatch.calls.arguments.parameter_names`.
    """
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    found = [*named_positionals(names, args), *kwargs.items()]
    for path, value in found:  # which grows meanwhile
        if isinstance(value, Tensor):
            tensors[path] = value
        elif value is not None:
            children = children_unless_leaf(value)
            others[path] = value if children is None else (type(value), len(children))
            found += [(f"{path}.{key}", child) for key, child in children or ()]
    return CallLeaves(tensors, others)


def replace_tensors(
    names: _Names, args: Sequence[Any], kwargs: Mapping[str, Any], by_path: Mapping[str, Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with other tensors.

    Raises:
        ConfigError: an argument holds tensors in a container of a class that cannot be rebuilt.
    """
    named = (*named_positionals(names, args), *kwargs.items())
    parts = {path: [tensor] for path, tensor in by_path.items()}
    try:
        return _calls_from(named, len(args), parts, 1)[0]
    except SplitError as error:
        what = f"{error}, so its tensors cannot be replaced by static ones. Pass them by themselves."
        raise ConfigError(what) from error


def _calls_from(
    named: Sequence[tuple[str, Any]], positional: int, parts: Mapping[str, Sequence[Any]], lanes: int
) -> list[Call]:
    """A call for each lane, with the leaves that `parts` has, by path, replaced by that lane's part."""
    columns = [_replaced(name, value, parts, lanes) for name, value in named]
    keywords = [name for name, _ in named[positional:]]
    calls = []
    for lane in range(lanes):
        own = [column[lane] for column in columns]
        calls.append((tuple(own[:positional]), dict(zip(keywords, own[positional:], strict=True))))
    return calls


def _replaced(path: str, value: Any, parts: Mapping[str, Sequence[Any]], lanes: int) -> Sequence[Any]:
    """A value, for each lane: with the leaves that `parts` has, by path, replaced by that lane's part.

    Raises:
        SplitError: a container cannot be rebuilt from its items.
    """
    if path in parts:
        return parts[path]
    children = children_of(value)
    if not children:
        return [value] * lanes
    columns = [_replaced(f"{path}.{key}", child, parts, lanes) for key, child in children]
    if all(own is child for (_, child), column in zip(children, columns, strict=True) for own in column):
        return [value] * lanes  # nothing in it is replaced: every lane gets the caller's own object
    try:
        return [rebuild(value, [column[lane] for column in columns]) for lane in range(lanes)]
    except (TypeError, ValueError) as error:
        what = f"a {type(value).__name__}, which cannot be made anew from its items ({error})"
        raise SplitError(f"argument {path!r} is {what}") from error


def named_positionals(names: _Names, args: Sequence[Any]) -> tuple[tuple[str, Any], ...]:
    """Positional arguments with their parameters' names; those of `*args` are numbered."""
    positional, rest = names
    if len(args) > len(positional):
        positional += tuple(f"{rest or 'args'}.{index}" for index in range(len(args) - len(positional)))
    return tuple([(positional[at], value) for at, value in enumerate(args)])


def children_unless_leaf(value: Any) -> list[tuple[str, Any]] | None:
    """Children of a container; None for a leaf. A cache counts as a leaf, because it is changed in place."""
    if type(value) in LEAF_CLASSES or isinstance(value, PLAIN) or splitter_for(value) is not None:
        return None
    return children_of(value)
