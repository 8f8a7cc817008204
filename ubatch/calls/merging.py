"""Rules for merging the lanes' outputs, and how a proof learns them from an unsplit run and a run in lanes.

    rule       learned when                                     merges by
    Rows       one dimension of a tensor follows the batch      concatenating along it
    Listed     a list's length follows the batch                chaining the lists
    Given      the call returned one of its arguments           returning the caller's
    Cached     it is a cache                                    merging the parts into the caller's cache, or a new one
    Items      it is a container                                item by item
    Same       anything else, equal in all lanes                taking the first lane's

The proof runs two lanes of unequal size. A size follows the batch if it is `k` times the number of rows in both lanes
and in the unsplit run. What was zero, false or empty may be a count or a list of rows, which the lanes' values would
have to be added up for; so `Same` takes only that value for it.

A call without a proof has its rules guessed (`ubatch.calls.outputs`). `Joined` and `First` are `Rows` and `Same` for
guesses: they check nothing, because a guess is made from the values that it merges.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ubatch.calls.arguments import longest_named
from ubatch.calls.caches import CacheSplitter, splitter_for
from ubatch.calls.call_plan import CallPlan, CannotSplit, LaneParts, Leaf, merge_cache
from ubatch.calls.closeness import Comparison, identical
from ubatch.calls.containers import PLAIN, attributes_of, children_of, rebuild
from ubatch.calls.copies import Copier
from ubatch.schedules.vote import DeclineReason

__all__ = [
    "Cached",
    "First",
    "Items",
    "Joined",
    "Learner",
    "Rule",
    "cannot",
    "columns_of",
    "mismatch",
    "named_dim",
    "sizes_along",
    "zero_dim",
]


# ----------------------------------------------------------------------------------------------------------- rules


class Rule(ABC):
    """How the lanes' values at one place are merged into one value."""

    @abstractmethod
    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        """Merge the lanes' `values` into one.

        Raises:
            CannotSplit: the values do not fit the learned rule.
        """


@dataclass(frozen=True)
class First(Rule):
    """The first lane's value."""

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        return values[0]


@dataclass(frozen=True)
class Same(First):
    """A value that does not depend on the rows; of a zero or empty one in the proof (`void`), only that."""

    void: tuple[Any, ...] = ()

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        first = values[0]
        if not all(value is first or identical(first, value) for value in (*values[1:], *self.void)):
            raise _unlike(path, values)
        return first


@dataclass(frozen=True)
class Joined(Rule):
    """Tensors concatenated along `dim`, or lists chained."""

    dim: int = 0

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        first = values[0]
        return torch.cat(list(values), self.dim) if isinstance(first, Tensor) else type(first)(itertools.chain(*values))


@dataclass(frozen=True)
class Rows(Joined):
    """A tensor, concatenated along `dim`."""

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        if not all(isinstance(value, Tensor) for value in values):
            raise _unlike(path, values)
        if not _follow(sizes_along(values, self.dim), parts.rows):
            raise _unlike(path, values)
        if any(map(attributes_of, values)):
            raise cannot(path, "has attributes, unlike in the call that was proved")
        merged = super().merge(path, values, parts)
        if type(merged) is not type(values[0]):
            raise cannot(path, f"is a {type(values[0]).__name__}, which becomes a {type(merged).__name__}")
        return merged


@dataclass(frozen=True)
class Listed(Joined):
    """A list or tuple with items for every row."""

    kind: type = list

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        if any(type(value) is not self.kind for value in values) or not _follow([*map(len, values)], parts.rows):
            raise _unlike(path, values)
        return super().merge(path, values, parts)


@dataclass(frozen=True)
class Given(Rule):
    """One of the call's arguments: the caller's own object."""

    argument: str

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        if not all(value is own for value, own in zip(values, parts.of(self.argument), strict=True)):
            raise _unlike(path, values)
        return parts.whole(self.argument)


@dataclass(frozen=True)
class Cached(Rule):
    """A cache."""

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        splitter = splitter_for(values[0])
        if splitter is None or any(type(value) is not type(values[0]) for value in values):
            raise _unlike(path, values)
        whole = parts.cache_of(values[0])
        return whole if whole is not None else merge_cache(splitter, values, None)


@dataclass(frozen=True)
class Items(Rule):
    """A container of class `kind`: a rule per item, or one `each` for any number of items."""

    kind: type
    rules: Mapping[str, Rule]
    each: Rule | None = None

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        columns = columns_of(values)
        if columns is None or type(values[0]) is not self.kind:
            raise _unlike(path, values)
        if self.each is None and list(columns) != list(self.rules):
            raise _unlike(path, values)
        rules = self.rules if self.each is None else dict.fromkeys(columns, self.each)
        merged = [rules[key].merge(f"{path}.{key}", column, parts) for key, column in columns.items()]
        return _rebuilt(path, values[0], merged)


# -------------------------------------------------------------------------------------------------------- learning


class Learner:
    """Learns the merge rules of a call, and compares the unsplit result with the lanes'.

    Args:
        whole: the plan of the call that ran unsplit.
        order: for each row of the call in lanes, its row number in the unsplit call.
    """

    def __init__(
        self,
        compare: Comparison,
        parts: LaneParts,
        whole: CallPlan,
        order: Sequence[int],
        output_dims: Mapping[str, int | None],
    ) -> None:
        self._compare = compare
        self._parts = parts
        self._order = order
        self._repeats = list(order) != list(range(whole.rows))
        self._rows = whole.rows
        self._dims = output_dims
        self._given = {
            id(leaf.value): leaf.path
            for leaf in whole.leaves
            if not isinstance(leaf.value, PLAIN) and splitter_for(leaf.value) is None
        }

    def learn(self, path: str, whole: Any, lanes: Sequence[Any]) -> Rule:
        """The rule for one value: `whole` in the unsplit call, `lanes` in the lanes.

        Raises:
            CannotSplit: no rule merges these values.
            Unequal: the rows depend on each other.
        """
        if any(type(lane) is not type(whole) for lane in lanes):
            raise _differs(path, whole, lanes)
        given = self._given.get(id(whole))
        if given is not None and all(lane is part for lane, part in zip(lanes, self._parts.of(given), strict=True)):
            return Given(given)
        if isinstance(whole, Tensor):
            return self._tensor(path, whole, lanes)
        if splitter_for(whole) is not None:
            if self._parts.cache_of(lanes[0]) is None:
                merged = Cached().merge(path, lanes, self._parts)
                self._compare.trees(path, self._picked(whole, None, splitter_for(whole)), merged)
            return Cached()
        if children_of(whole) is None:
            return _leaf(path, whole, lanes)
        if type(whole) in (list, tuple) and self._follow([len(whole), *map(len, lanes)]):
            listed = Listed(kind=type(whole))
            self._compare.trees(path, self._picked(whole, 0), listed.merge(path, lanes, self._parts))
            return listed
        return self._items(path, whole, lanes)

    def check_argument(self, leaf: Leaf, copied: Leaf) -> None:
        """Compare an argument after the unsplit call with its copy after the run in lanes; `Unequal` if they differ."""
        path, expected = f"argument {leaf.path!r}", self._picked(leaf.value, leaf.dim, leaf.splitter)
        if isinstance(expected, Tensor):
            self._compare.tensors(path, expected, copied.value, leaf.dim)
        else:
            self._compare.trees(path, expected, copied.value)

    def _tensor(self, path: str, whole: Tensor, lanes: Sequence[Tensor]) -> Rule:
        if whole.layout is not torch.strided or whole.is_nested:
            raise cannot(path, f"is a {whole.layout} tensor")
        if any(lane.requires_grad != whole.requires_grad for lane in lanes):
            raise cannot(path, "carries gradients in the whole call or in lanes, but not in both")
        if any(lane.dim() != whole.dim() for lane in lanes):
            raise _differs(path, whole, lanes)
        dim = next((at for at, size in enumerate(whole.shape) if any(lane.shape[at] != size for lane in lanes)), None)
        if dim is None:
            if all(identical(whole, lane) for lane in lanes):
                return _same(whole)
            if whole.dim() == 0:
                raise zero_dim(path)
            raise cannot(path, f"has shape {tuple(whole.shape)} whatever the batch, and other values in each lane")
        if not self._follow(sizes_along([whole, *lanes], dim)):
            raise _differs(path, whole, lanes)
        named, _ = named_dim(path, self._dims)
        if named is not None and named % whole.dim() != dim:
            raise cannot(path, f"follows the batch along dimension {dim}, not {named}, which output_dims says")
        if attributes_of(whole):
            raise cannot(path, f"has attributes ({', '.join(attributes_of(whole))})")
        rule = Rows(dim)
        self._compare.tensors(path, self._picked(whole, dim), rule.merge(path, lanes, self._parts), dim)
        return rule

    def _items(self, path: str, whole: Any, lanes: Sequence[Any]) -> Rule:
        columns = columns_of([whole, *lanes])
        if columns is None:
            raise _differs(path, whole, lanes)
        rules = {key: self.learn(f"{path}.{key}", child, own) for key, (child, *own) in columns.items()}
        _check_rebuilt(path, whole)
        alike = type(whole) in (list, tuple) and len(set(map(repr, rules.values()))) == 1
        return Items(type(whole), rules, next(iter(rules.values())) if alike else None)

    def _follow(self, sizes: Sequence[int]) -> bool:
        """Whether the sizes (unsplit, then each lane) are the same multiple of their numbers of rows."""
        return _follow(sizes, [self._rows, *self._parts.rows])

    def _picked(self, value: Any, dim: int | None, splitter: CacheSplitter | None = None) -> Any:
        """A value of the unsplit call that is split along `dim`, with the rows that the call in lanes had."""
        if not self._repeats or (dim is None and splitter is None):
            return value
        if dim is None:
            return Copier(self._order, self._rows).copy(value, None, splitter)
        each = (value.shape[dim] if isinstance(value, Tensor) else len(value)) // self._rows
        at = [row * each + offset for row in self._order for offset in range(each)]
        if isinstance(value, Tensor):
            return value.index_select(dim, torch.tensor(at, dtype=torch.long, device=value.device))
        return type(value)(value[index] for index in at)


def _leaf(path: str, whole: Any, lanes: Sequence[Any]) -> Rule:
    if all(lane is whole or identical(whole, lane) for lane in lanes):
        return _same(whole)
    if isinstance(whole, PLAIN):
        raise _differs(path, whole, lanes)
    raise CannotSplit(
        DeclineReason.NO_SPLITTER,
        f"{path} is a {type(whole).__name__}, which nobody registered a splitter for. Use ubatch.register_splitter.",
    )


def _same(whole: Any) -> Same:
    """The rule for a value that was the same in the unsplit call and in all lanes."""
    if isinstance(whole, Tensor):
        return Same() if bool(whole.any()) else Same((whole.detach().clone(),))
    return Same() if whole or not isinstance(whole, (*PLAIN, set, frozenset)) else Same((whole,))


def _check_rebuilt(path: str, whole: Any) -> None:
    """Check that a container rebuilt from its items is equal to the original: in its items and its attributes.

    Raises:
        CannotSplit: the rebuilt container differs, or it has a tensor that is no item.
    """
    items = dict(children_of(whole) or [])
    made = _rebuilt(path, whole, list(items.values()))
    again, others = dict(children_of(made) or []), getattr(made, "__dict__", {})
    kept = items.keys() == again.keys() and all(again[key] is item for key, item in items.items())
    for name, own in getattr(whole, "__dict__", {}).items():
        if name not in items:
            kept &= name in others and not isinstance(own, Tensor)
            kept = kept and (own is others[name] or identical(own, others[name]))
    if not kept:
        raise cannot(path, f"is a {type(whole).__name__}, which is another one when made anew from its items")


# --------------------------------------------------------------------------------------------- for rules and guesses


def named_dim(path: str, dims: Mapping[str, int | None]) -> tuple[int | None, bool]:
    """The dimension that the user named for the output at `path` or for a container of it, and whether one was
    named."""
    name = path.removeprefix("output.")
    nameless = name.replace(".", "").isdigit()
    for known in (longest_named(name, dims), "output" if nameless else name.rpartition(".")[2]):
        if known is not None and known in dims:
            return dims[known], True
    return None, False


def columns_of(values: Sequence[Any]) -> dict[str, list[Any]] | None:
    """Each item of some containers, by key: one value per container. None if their classes or keys differ."""
    items = [dict(children_of(value) or []) for value in values]
    if any(type(value) is not type(values[0]) for value in values) or any(list(own) != list(items[0]) for own in items):
        return None
    return {key: [own[key] for own in items] for key in items[0]}


def sizes_along(values: Sequence[Tensor], dim: int) -> list[int]:
    """The tensors' sizes along `dim`; empty if one has no such dimension, or another size differs."""
    if any(not -value.dim() <= dim < value.dim() for value in values):
        return []
    beside = {value.shape[:dim] + value.shape[dim:][1:] for value in values}
    return [value.shape[dim] for value in values] if len(beside) == 1 else []


def cannot(path: str, what: str) -> CannotSplit:
    """The refusal to merge the output at `path`, which `what` describes."""
    return CannotSplit(
        DeclineReason.CANNOT_MERGE,
        f"{path} {what}, so the lanes' outputs cannot be merged. Leave it out of the wrapped module's result. In calls "
        "that are not proved, output_dims may name its batch dimension, or None if every lane returns the same.",
    )


def mismatch(path: str, values: Sequence[Any], where: str) -> CannotSplit:
    """The refusal to merge `values`."""
    return cannot(path, f"is {' and '.join(map(_shown, values))} {where}")


def zero_dim(path: str) -> CannotSplit:
    """The refusal to merge tensors without dimensions."""
    return CannotSplit(
        DeclineReason.ZERO_DIM_OUTPUT,
        f"{path} has no dimensions (a loss?), so the lanes' values cannot be concatenated. Compute it outside the "
        "wrapped module.",
    )


def _unlike(path: str, values: Sequence[Any]) -> CannotSplit:
    return mismatch(path, values, "in the lanes, unlike in the call that was proved")


def _differs(path: str, whole: Any, lanes: Sequence[Any]) -> CannotSplit:
    return mismatch(path, lanes, f"in lanes, {_shown(whole)} in the whole call")


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, PLAIN):
        return f"{value!r:.40}"
    keys = [key for key, _ in children_of(value) or ()]
    return f"a {type(value).__name__}" + (f" of items {', '.join(keys):.40}" if keys else "")


def _follow(sizes: Sequence[int], rows: Sequence[int]) -> bool:
    """Whether each size is the same multiple, at least 1, of its number of rows."""
    multiple = sum(sizes) // max(1, sum(rows))
    return multiple > 0 and list(sizes) == [own * multiple for own in rows]


def _rebuilt(path: str, like: Any, children: list[Any]) -> Any:
    try:
        return rebuild(like, children)
    except (TypeError, ValueError) as error:
        what = f"is a {type(like).__name__}, which cannot be made anew from its items ({error})"
        raise cannot(path, what) from error
