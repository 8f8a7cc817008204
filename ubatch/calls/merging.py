"""Rules for merging the lanes' outputs, and how a proof learns them from an unsplit run and a run in lanes.

    rule       learned when                                     merges by
    Rows       one dimension of a tensor, or a list's length,   concatenating along it, or chaining the lists
               follows the batch
    Given      the call returned one of its arguments           returning the caller's
    Cached     it is a cache                                    merging the parts into the caller's cache, or a new one
    Items      it is a container                                item by item
    Same       anything else, equal in all lanes                taking the first lane's

The proof runs two lanes of unequal size. A size follows the batch if it is `k` times the number of rows in both lanes
and in the unsplit run. Lanes may agree on what is not the whole's, such as a count or a message. So `Same` takes only
values that proofs had, until there were four of them; another value is proved by itself (`OtherValue`).

A call without a proof has one rule, which merges outputs as their shapes suggest (`Guess` in `ubatch.calls.outputs`).
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
from ubatch.calls.caches import splitter_for
from ubatch.calls.call_plan import CallPlan, CannotSplit, LaneParts, Leaf, merge_cache
from ubatch.calls.closeness import Comparison, identical
from ubatch.calls.containers import PLAIN, attributes_of, children_of, rebuild
from ubatch.schedules.vote import DeclineReason

ENOUGH = 4
"""Different values that proofs must have had before any value will do."""
_KEPT_BYTES = 1 << 16
_UNLIKE = "in the lanes, unlike in the call that was proved"
_PROVING = "in the whole call and its lanes"


class OtherValue(CannotSplit):
    """A value that does not depend on the rows is another one than in the proofs so far."""


class Rule(ABC):
    """How the lanes' values at one place are merged into one value."""

    @abstractmethod
    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        """Merge the lanes' `values` into one.

        Raises:
            CannotSplit: the values do not fit the learned rule.
        """

    def joined(self, other: Rule) -> Rule:
        """This rule, with what an earlier proof of the same signature has learned in `other`."""
        return self


@dataclass(frozen=True)
class Same(Rule):
    """A value that does not depend on the rows: one of `proved`, or any value if there are none or enough of them."""

    proved: tuple[Any, ...] = ()

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        if not _all_equal(values):
            raise mismatch(path, values, _UNLIKE)
        if 0 < len(self.proved) < ENOUGH and not any(identical(values[0], each) for each in self.proved):
            raise OtherValue(DeclineReason.CANNOT_MERGE, f"{path} is {values[0]!r:.40}, unlike in the proof.")
        return values[0]

    def joined(self, other: Rule) -> Rule:
        known = other.proved if isinstance(other, Same) else ()
        more = [each for each in known if not any(identical(each, own) for own in self.proved)]
        return Same((*self.proved, *more))


@dataclass(frozen=True)
class Rows(Rule):
    """Tensors, lists or tuples of class `kind`, of which dimension `dim`, or the length, follows the batch."""

    dim: int
    kind: type

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        alike = all(type(value) is self.kind and not _marks_of(value) for value in values)
        if not alike or not _follow(sizes_of(values, self.dim), parts.rows):
            raise mismatch(path, values, _UNLIKE)
        return concatenated(values, self.dim)


@dataclass(frozen=True)
class Given(Rule):
    """One of the call's arguments: the caller's own object."""

    argument: str

    def fits(self, values: Sequence[Any], parts: LaneParts) -> bool:
        """Whether the lanes' values are their parts of the argument."""
        return all(value is own for value, own in zip(values, parts.parts[self.argument], strict=True))

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        if not self.fits(values, parts):
            raise mismatch(path, values, _UNLIKE)
        return next(leaf.value for leaf in parts.plan.leaves if leaf.path == self.argument)


@dataclass(frozen=True)
class Cached(Rule):
    """A cache."""

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        splitter = splitter_for(values[0])
        if splitter is None or any(type(value) is not type(values[0]) for value in values):
            raise mismatch(path, values, _UNLIKE)
        whole = parts.cache_of(values[0])
        return whole if whole is not None else merge_cache(splitter, values, None)


@dataclass(frozen=True)
class Items(Rule):
    """A container of class `kind`, with a rule for each item; or with any number of items, if they all have one rule
    (`every`)."""

    kind: type
    rules: Mapping[str, Rule]
    every: Rule | None = None

    def merge(self, path: str, values: Sequence[Any], parts: LaneParts) -> Any:
        columns = columns_of(path, values, _UNLIKE)
        rules = self.rules if self.every is None else dict.fromkeys(columns, self.every)
        if type(values[0]) is not self.kind or list(columns) != list(rules):
            raise mismatch(path, values, _UNLIKE)
        merged = [rules[key].merge(f"{path}.{key}", column, parts) for key, column in columns.items()]
        return rebuilt(path, values[0], merged)

    def joined(self, other: Rule) -> Rule:
        if not isinstance(other, Items) or self.rules.keys() != other.rules.keys():
            return self
        rules = {key: rule.joined(other.rules[key]) for key, rule in self.rules.items()}
        return Items(self.kind, rules, None if self.every is None else next(iter(rules.values())))


@dataclass(frozen=True)
class Learner:
    """Learns the merge rules of a call, and compares the unsplit result with the lanes'.

    Attributes:
        parts: the lanes' parts of the arguments.
        whole: the plan of the call that ran unsplit.
        output_dims: see `UBatchConfig`. A dimension named there must be the one that follows the batch.
    """

    compare: Comparison
    parts: LaneParts
    whole: CallPlan
    output_dims: Mapping[str, int | None]

    def learn(self, path: str, whole: Any, lanes: Sequence[Any]) -> Rule:
        """The rule for one value: `whole` in the unsplit call, `lanes` in the lanes.

        Raises:
            CannotSplit: no rule merges these values.
            Unequal: the rows depend on each other.
        """
        values, splitter = [whole, *lanes], splitter_for(whole)
        if any(type(lane) is not type(whole) for lane in lanes):
            raise mismatch(path, values, _PROVING)
        for leaf in self.whole.leaves if splitter is None else ():
            if leaf.value is whole and Given(leaf.path).fits(lanes, self.parts):
                return Given(leaf.path)
        if isinstance(whole, Tensor):
            return self._tensor(path, whole, lanes)
        if splitter is not None:
            if self.parts.cache_of(lanes[0]) is None:
                self.check(Leaf(path, whole, None, splitter), Cached().merge(path, lanes, self.parts))
            return Cached()
        if type(whole) in (list, tuple) and self._follow(values, 0):
            return self._rows(path, whole, lanes, 0)
        if children_of(whole) is not None:
            return self._items(path, whole, lanes)
        if _all_equal(values):
            return _same(values)
        if isinstance(whole, PLAIN):
            raise mismatch(path, values, _PROVING)
        what = f"is a {type(whole).__name__}, which nobody registered a splitter for (ubatch.register_splitter)"
        raise cannot(path, what, DeclineReason.NO_SPLITTER)

    def _tensor(self, path: str, whole: Tensor, lanes: Sequence[Tensor]) -> Rule:
        values = [whole, *lanes]
        if whole.layout is not torch.strided or whole.is_nested:
            raise cannot(path, f"is a {whole.layout} tensor")
        if any(lane.requires_grad != whole.requires_grad for lane in lanes):
            raise cannot(path, "carries gradients in the whole call or in lanes, but not in both")
        sizes = list(itertools.zip_longest(*(value.shape for value in values)))
        dim = next((at for at, each in enumerate(sizes) if len(set(each)) > 1), None)
        if dim is None:
            if _all_equal(values):
                return _same(values)
            if whole.dim() == 0:
                raise cannot(path, "has no dimensions (a loss?)", DeclineReason.ZERO_DIM_OUTPUT)
            raise cannot(path, f"has shape {tuple(whole.shape)} whatever the batch, and other values in each lane")
        if any(map(attributes_of, values)) or not self._follow(values, dim):
            raise mismatch(path, values, _PROVING)
        named, _ = named_dim(path, self.output_dims)
        if named is not None and named % whole.dim() != dim:
            raise cannot(path, f"follows the batch along dimension {dim}, not {named}, which output_dims says")
        return self._rows(path, whole, lanes, dim)

    def _rows(self, path: str, whole: Any, lanes: Sequence[Any], dim: int) -> Rule:
        rule = Rows(dim, type(whole))
        merged = rule.merge(path, lanes, self.parts)
        if type(merged) is not type(whole):
            raise cannot(path, f"is a {type(whole).__name__}, which becomes a {type(merged).__name__}")
        self.check(Leaf(path, whole, dim), merged)
        return rule

    def _items(self, path: str, whole: Any, lanes: Sequence[Any]) -> Rule:
        columns = columns_of(path, [whole, *lanes], _PROVING)
        rules = {key: self.learn(f"{path}.{key}", child, own) for key, (child, *own) in columns.items()}
        _check_rebuilt(path, whole)
        alike = type(whole) in (list, tuple) and len(set(map(repr, rules.values()))) == 1
        return Items(type(whole), rules, next(iter(rules.values())) if alike else None)

    def _follow(self, values: Sequence[Any], dim: int) -> bool:
        """Whether the size along `dim` of the values (unsplit, then each lane) follows the batch."""
        return _follow(sizes_of(values, dim), [self.whole.rows, *self.parts.rows])

    def check(self, leaf: Leaf, got: Any) -> None:
        """Compare a value of the unsplit call with `got`, which has its rows in the order of the call in lanes;
        `Unequal` if they differ."""
        path, whole, dim, splitter = leaf
        rows, order = self.whole.rows, self.compare.order
        if (dim is not None or splitter is not None) and list(order) != list(range(rows)):
            each = 1 if dim is None else sizes_of([whole], dim)[0] // rows
            order = [row * each + offset for row in order for offset in range(each)]
            whole = leaf.copied(order, rows)
        if isinstance(whole, Tensor):
            self.compare.tensors(path, whole, got, dim)
        else:
            self.compare.trees(path, whole, got, set())


def _same(values: Sequence[Any]) -> Same:
    """The rule for a value that was the same in the unsplit call and in all lanes. What is one and the same object is
    no result of the rows, and a large tensor is not kept."""
    whole = values[0]
    if isinstance(whole, Tensor):
        kept = whole.nbytes <= _KEPT_BYTES and any(value is not whole for value in values)
        return Same((whole.detach().clone(),)) if kept else Same()
    return Same((whole,)) if isinstance(whole, (*PLAIN, set, frozenset)) else Same()


def _check_rebuilt(path: str, whole: Any) -> None:
    """Check that a container rebuilt from its items is equal to the original, in items and attributes.

    Raises:
        CannotSplit: it differs, or an attribute other than the items is a tensor, which may have rows.
    """
    items, rest = _contents(whole)
    made_items, made_rest = _contents(rebuilt(path, whole, list(items.values())))
    same = list(items) == list(made_items) and rest.keys() <= made_rest.keys()
    same = same and all(made_items[key] is item for key, item in items.items())
    same = same and all(not isinstance(own, Tensor) and _all_equal([own, made_rest[key]]) for key, own in rest.items())
    if not same:
        raise cannot(path, f"is a {type(whole).__name__}, which is another one when made anew from its items")


def _contents(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A container's items, and its other attributes."""
    items = dict(children_of(value) or ())
    return items, {name: own for name, own in getattr(value, "__dict__", {}).items() if name not in items}


def _all_equal(values: Sequence[Any]) -> bool:
    """Whether all values are the first one, or equal to it bit for bit."""
    return all(value is values[0] or identical(values[0], value) for value in values[1:])


def _follow(sizes: Sequence[int], rows: Sequence[int]) -> bool:
    """Whether each size is the same multiple, at least 1, of its number of rows."""
    multiple = sum(sizes) // max(1, sum(rows))
    return multiple > 0 and list(sizes) == [own * multiple for own in rows]


def _marks_of(value: Any) -> dict[str, Any]:
    """A tensor's attributes, which are lost when it is concatenated."""
    return attributes_of(value) if isinstance(value, Tensor) else {}


# ----------------------------------------------------------------------------------- also for guesses, in `outputs`


def named_dim(path: str, dims: Mapping[str, int | None]) -> tuple[int | None, bool]:
    """The dimension that the user named for the output at `path` or for a container of it, and whether one was
    named."""
    name = path.removeprefix("output.")
    nameless = name.replace(".", "").isdigit()
    for known in (longest_named(name, dims), "output" if nameless else name.rpartition(".")[2]):
        if known is not None and known in dims:
            return dims[known], True
    return None, False


def columns_of(path: str, values: Sequence[Any], where: str) -> dict[str, list[Any]]:
    """The items of several containers: key -> the item of each; `CannotSplit` if their classes or keys differ."""
    children = [children_of(value) for value in values]
    items = [dict(own or ()) for own in children]
    if None in children or len({(type(value), *own) for value, own in zip(values, items, strict=True)}) > 1:
        raise mismatch(path, values, where)
    return {key: [own[key] for own in items] for key in items[0]}


def sizes_of(values: Sequence[Any], dim: int) -> list[int]:
    """Sizes of tensors along `dim`, or lengths of lists; empty if a tensor has no such dimension, or if tensors differ
    in another size."""
    shapes = [tuple(value.shape) if isinstance(value, Tensor) else (len(value),) for value in values]
    if any(not -len(shape) <= dim < len(shape) for shape in shapes):
        return []
    beside = {shape[:dim] + shape[dim:][1:] for shape in shapes}
    return [shape[dim] for shape in shapes] if len(beside) == 1 else []


def concatenated(values: Sequence[Any], dim: int) -> Any:
    """Tensors, concatenated along `dim`; or lists or tuples, chained."""
    if isinstance(values[0], Tensor):
        return torch.cat(list(values), dim)
    return type(values[0])(itertools.chain(*values))


def rebuilt(path: str, like: Any, children: list[Any]) -> Any:
    """A container like `like` with other items; `CannotSplit` if it cannot be made."""
    try:
        return rebuild(like, children)
    except (TypeError, ValueError) as error:
        what = f"is a {type(like).__name__}, which cannot be made anew from its items ({error})"
        raise cannot(path, what) from error


def cannot(path: str, what: str, reason: DeclineReason = DeclineReason.CANNOT_MERGE) -> CannotSplit:
    """The refusal to merge the output at `path`: `what` says what it is or has."""
    return CannotSplit(
        reason,
        f"{path} {what}, so the lanes' outputs cannot be merged. Leave it out of the wrapped module's result. In a "
        "call that is not proved, output_dims can name its batch dimension, or None if every lane returns the same.",
    )


def mismatch(path: str, values: Sequence[Any], where: str) -> CannotSplit:
    """The refusal to merge these values; `where` says where they were seen."""
    return cannot(path, f"is {' and '.join(map(_shown, values))} {where}")


def _shown(value: Any) -> str:
    if isinstance(value, PLAIN):
        return f"{value!r:.40}"
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    names = [*_marks_of(value), *dict(children_of(value) or ())]
    return f"a {type(value).__name__}{shape}" + (f" with {', '.join(names):.40}" if names else "")
