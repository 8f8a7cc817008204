"""Rules for merging the lanes' outputs: learned once per signature from an unsplit run and a run in lanes.

    rule       learned when                                     merges by
    Rows       one dimension of a tensor follows the batch      concatenating along it
    Listed     a list's length follows the batch                chaining the lists
    Given      the call returned one of its arguments           returning the caller's
    Cached     it is a cache                                    merging the parts into the caller's cache, or a new one
    Each       a list or tuple whose items all have one rule    item by item, for any number of items
    Items      any other container                              item by item
    Same       anything else, equal in all lanes                taking the first lane's

The proof runs two lanes of unequal size. A size follows the batch if it is `k` times the number of rows in both lanes
and in the unsplit run. What was zero, false or empty may be a count or a list of rows, which the lanes' values would
have to be added up for; so `Same` takes only that value for it.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ubatch.calls.caches import splitter_for
from ubatch.calls.call_plan import CallPlan, CannotSplit, LaneParts, Leaf, merge_cache
from ubatch.calls.closeness import Comparison, identical
from ubatch.calls.containers import PLAIN, attributes_of, children_of, rebuild
from ubatch.calls.copies import Copier
from ubatch.calls.outputs import named_dim
from ubatch.schedules.vote import DeclineReason

__all__ = ["Learner", "Rule"]


class Rule(ABC):
    """How the lanes' values at one place are merged into one value."""

    @abstractmethod
    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        """Merge the lanes' `values` into one.

        Raises:
            CannotSplit: the values do not fit the learned rule.
        """


@dataclass(frozen=True)
class Rows(Rule):
    """A tensor, concatenated along `dim`."""

    dim: int

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        if not all(isinstance(value, Tensor) and value.dim() > self.dim for value in values):
            raise _unlike(path, values)
        beside = {value.shape[: self.dim] + value.shape[self.dim :][1:] for value in values}
        if len(beside) > 1 or not _follow(parts, [value.shape[self.dim] for value in values]):
            raise _unlike(path, values)
        if any(map(attributes_of, values)):
            raise _cannot(path, "has attributes, unlike in the call that was proved")
        merged = torch.cat(list(values), self.dim)
        if type(merged) is not type(values[0]):
            raise _cannot(path, f"is a {type(values[0]).__name__}, which becomes a {type(merged).__name__}")
        return merged


@dataclass(frozen=True)
class Listed(Rule):
    """A list or tuple with items for every row."""

    kind: type

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        if not all(type(value) is self.kind for value in values) or not _follow(
            parts, [len(value) for value in values]
        ):
            raise _unlike(path, values)
        return self.kind(itertools.chain(*values))


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
class Each(Rule):
    """A list or tuple of `kind`, whose items all merge by one rule."""

    kind: type[Any]
    rule: Rule

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        same = all(type(value) is self.kind for value in values) and len({len(value) for value in values}) == 1
        if not same:
            raise _unlike(path, values)
        columns = list(zip(*values, strict=True))
        return self.kind([self.rule.merge(f"{path}.{at}", column, parts) for at, column in enumerate(columns)])


@dataclass(frozen=True)
class Items(Rule):
    """A container of class `kind`."""

    kind: type
    rules: Mapping[str, Rule]

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        columns = [children_of(value) or [] for value in values]
        keys = list(self.rules)
        if any(type(value) is not self.kind for value in values) or any(
            [key for key, _ in column] != keys for column in columns
        ):
            raise _unlike(path, values)
        return _rebuilt(
            path,
            values[0],
            [
                rule.merge(f"{path}.{key}", [column[at][1] for column in columns], parts)
                for at, (key, rule) in enumerate(self.rules.items())
            ],
        )


@dataclass(frozen=True)
class Same(Rule):
    """A value that does not depend on the rows; of a zero or empty one in the proof, only `void`."""

    void: Any = None
    only_void: bool = False

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        first = values[0]
        for value in (*values[1:], *([self.void] if self.only_void else ())):
            if value is not first and not identical(first, value):
                raise _unlike(path, values)
        return first


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
        dim, named = named_dim(path, self._dims)
        if any(type(lane) is not type(whole) for lane in lanes):
            kinds = [type(value).__name__ for value in (whole, *lanes)]
            raise _cannot(path, f"is a {kinds[0]} in the whole call, a {kinds[1]} and a {kinds[2]} in lanes")
        given = self._given.get(id(whole))
        if given is not None and all(lane is part for lane, part in zip(lanes, self._parts.of(given), strict=True)):
            return Given(given)
        if isinstance(whole, Tensor):
            return self._tensor(path, whole, lanes, dim if named else None)
        if splitter_for(whole) is not None:
            return self._cache(path, whole, lanes)
        children = children_of(whole)
        if children is None:
            return self._leaf(path, whole, lanes)
        if type(whole) in (list, tuple) and self._follow([len(whole), *map(len, lanes)]):
            joined = [item for lane in lanes for item in lane]
            self._compare.trees(path, self._picked(whole), joined)
            return Listed(type(whole))
        return self._items(path, whole, lanes, children)

    def _tensor(self, path: str, whole: Tensor, lanes: Sequence[Tensor], named: int | None) -> Rule:
        if whole.layout is not torch.strided or whole.is_nested:
            raise _cannot(path, f"is a {whole.layout} tensor")
        if any(lane.requires_grad != whole.requires_grad for lane in lanes):
            raise _cannot(path, "carries gradients in the whole call or in lanes, but not in both")
        if len({each.dim() for each in (whole, *lanes)}) > 1:
            raise _cannot(path, f"has {_shapes(whole, lanes)}")
        differ = [
            at
            for at, sizes in enumerate(zip(whole.shape, *(lane.shape for lane in lanes), strict=True))
            if len(set(sizes)) > 1
        ]
        if not differ:
            if whole.dim() == 0 and not all(identical(whole, lane) for lane in lanes):
                raise CannotSplit(
                    DeclineReason.ZERO_DIM_OUTPUT,
                    f"{path} has no dimensions (a loss?), so the lanes' values cannot be concatenated. "
                    "Compute it outside the wrapped module.",
                )
            if not all(identical(whole, lane) for lane in lanes):
                raise _cannot(path, f"has shape {tuple(whole.shape)} whatever the batch, and other values in each lane")
            return _same(whole)
        if len(differ) > 1 or not self._follow([each.shape[differ[0]] for each in (whole, *lanes)]):
            raise _cannot(path, f"has {_shapes(whole, lanes)}")
        dim = differ[0]
        if named is not None and named % whole.dim() != dim:
            raise _cannot(path, f"follows the batch along dimension {dim}, not {named}, which output_dims says")
        rule = Rows(dim)
        if attributes_of(whole):
            raise _cannot(path, f"has attributes ({', '.join(attributes_of(whole))})")
        self._compare.tensors(path, self._picked_rows(whole, dim), rule.merge(path, lanes, self._parts), dim)
        return rule

    def _cache(self, path: str, whole: Any, lanes: Sequence[Any]) -> Rule:
        splitter = splitter_for(whole)
        if splitter is None:
            raise _cannot(path, f"is a {type(whole).__name__}, which nobody registered a splitter for")
        if self._parts.cache_of(lanes[0]) is None:
            self._compare.trees(path, self.rows_of_cache(whole), merge_cache(splitter, lanes, None))
        return Cached()

    def rows_of_cache(self, cache: Any) -> Any:
        """A cache of the unsplit call, reduced to the rows of the call in lanes."""
        return Copier(self._order, self._rows).copy(cache, None, splitter_for(cache)) if self._repeats else cache

    def check_argument(self, leaf: Leaf, copied: Leaf) -> None:
        """Compare an argument after the unsplit call with its copy after the run in lanes; `Unequal` if they differ."""
        path, value, copy = f"argument {leaf.path!r}", leaf.value, copied.value
        if isinstance(value, Tensor):
            expected = value if leaf.dim is None else self._picked_rows(value, leaf.dim)
            self._compare.tensors(path, expected, copy, leaf.dim)
        elif leaf.splitter is not None:
            self._compare.trees(path, self.rows_of_cache(value), copy)
        elif leaf.dim is not None:
            self._compare.trees(path, self._picked(value), list(copy))
        else:
            self._compare.trees(path, value, copy)

    def _leaf(self, path: str, whole: Any, lanes: Sequence[Any]) -> Rule:
        if all(lane is whole or identical(whole, lane) for lane in lanes):
            return _same(whole)
        if isinstance(whole, PLAIN):
            raise _cannot(path, f"is {whole!r:.40} in the whole call, {lanes[0]!r:.40} and {lanes[1]!r:.40} in lanes")
        raise CannotSplit(
            DeclineReason.NO_SPLITTER,
            f"{path} is a {type(whole).__name__}, which nobody registered a splitter for. Use "
            "ubatch.register_splitter.",
        )

    def _items(self, path: str, whole: Any, lanes: Sequence[Any], children: Sequence[tuple[str, Any]]) -> Rule:
        columns = [children_of(lane) or [] for lane in lanes]
        keys = [key for key, _ in children]
        if any([key for key, _ in column] != keys for column in columns):
            raise _cannot(path, f"has {len(whole)} items in the whole call, {[len(each) for each in lanes]} in lanes")
        rules = {
            key: self.learn(f"{path}.{key}", child, [column[at][1] for column in columns])
            for at, (key, child) in enumerate(children)
        }
        self._check_rebuilt(path, whole, children)
        alike = set(map(repr, rules.values()))
        if type(whole) in (list, tuple) and len(alike) == 1:
            return Each(type(whole), next(iter(rules.values())))
        return Items(type(whole), rules)

    def _check_rebuilt(self, path: str, whole: Any, children: Sequence[tuple[str, Any]]) -> None:
        """Check that a container rebuilt from its items is equal to the original.

        Raises:
            CannotSplit: the rebuilt container differs.
        """
        made = _rebuilt(path, whole, [child for _, child in children])
        again = children_of(made) or []
        changed = any(one is not other for (_, one), (_, other) in zip(children, again, strict=False))
        names = {key for key, _ in children}
        mine, others = getattr(whole, "__dict__", {}), getattr(made, "__dict__", {})
        extra = [name for name in mine if name not in names]
        lost = any(name not in others or not self._alike(mine[name], others[name]) for name in extra)
        if changed or lost or len(again) != len(children):
            raise _cannot(path, f"is a {type(whole).__name__}, which is another one when made anew from its items")

    @staticmethod
    def _alike(one: Any, other: Any) -> bool:
        """Whether an attribute other than the items is the same for all rows."""
        return not isinstance(one, Tensor) and (one is other or identical(one, other))

    def _follow(self, sizes: Sequence[int]) -> bool:
        """Whether the sizes (unsplit, then each lane) are the same multiple of their numbers of rows."""
        return _multiples(sizes, [self._rows, *self._parts.rows])

    def _picked(self, items: Sequence[Any]) -> list[Any]:
        """The items that belong to the rows of the call in lanes."""
        each = len(items) // self._rows
        return [item for row in self._order for item in items[row * each : (row + 1) * each]]

    def _picked_rows(self, whole: Tensor, dim: int) -> Tensor:
        if not self._repeats:
            return whole
        each = whole.shape[dim] // self._rows
        at = [row * each + offset for row in self._order for offset in range(each)]
        return whole.index_select(dim, torch.tensor(at, dtype=torch.long, device=whole.device))


def _same(whole: Any) -> Same:
    """The rule for a value that was the same in the unsplit call and in all lanes."""
    if isinstance(whole, Tensor):
        return Same(whole.detach().clone(), True) if not bool(whole.any()) else Same()
    return Same(whole, True) if isinstance(whole, (*PLAIN, set, frozenset)) and not whole else Same()


def _follow(parts: LaneParts, sizes: Sequence[int]) -> bool:
    """Whether each lane's size is the same multiple of its number of rows."""
    return _multiples([sum(sizes), *sizes], [sum(parts.rows), *parts.rows])


def _multiples(sizes: Sequence[int], rows: Sequence[int]) -> bool:
    """Whether `sizes` is `rows` times one integer."""
    if not rows[0] or not sizes[0] or sizes[0] % rows[0]:
        return False
    multiple = sizes[0] // rows[0]
    return all(size == own * multiple for size, own in zip(sizes, rows, strict=True))


def _rebuilt(path: str, like: Any, children: list[Any]) -> Any:
    try:
        return rebuild(like, children)
    except (TypeError, ValueError) as error:
        what = f"is a {type(like).__name__}, which cannot be made anew from its items ({error})"
        raise _cannot(path, what) from error


def _shapes(whole: Tensor, lanes: Sequence[Tensor]) -> str:
    return f"shape {tuple(whole.shape)} in the whole call, {' and '.join(str(tuple(x.shape)) for x in lanes)} in lanes"


def _cannot(path: str, what: str) -> CannotSplit:
    return CannotSplit(
        DeclineReason.CANNOT_MERGE,
        f"{path} {what}, so the lanes' outputs cannot be merged. Leave it out of the wrapped module's result.",
    )


def _unlike(path: str, values: Sequence[Any]) -> CannotSplit:
    seen = [tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__ for value in values]
    return CannotSplit(
        DeclineReason.CANNOT_MERGE, f"{path} is {seen} in the lanes, unlike in the call that was proved."
    )
