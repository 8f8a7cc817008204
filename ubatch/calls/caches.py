"""Splitting and merging of caches: arguments that a model changes in place.

A cache is an object, not a tensor, so its class needs a splitter. Users register one with `register_splitter`;
transformers' caches are registered here by qualified name, so this package never imports transformers. All of them are
split in one way: by a walk through their attributes and those of their layers.

    tensor with one entry per row     a lane gets its rows: a view where the model grows it (a new tensor per step),
                                      a copy where the model writes to it in place
    other tensor (a length)           every lane gets a copy of its own
    number, flag, name, class         the same for all lanes, before and after
    dict, list, tuple                 item by item

A layer or attribute that is not known here is refused by name when the cache is split, before the model runs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ubatch.calls.containers import PLAIN
from ubatch.errors import SplitError

__all__ = ["CacheSplitter", "register_splitter", "splitter_for"]


class CacheSplitter(Protocol):
    """How one class of cache is cut along its batch dimension and put together again."""

    def split(self, cache: Any, bounds: Sequence[slice]) -> list[Any]:
        """One part per lane; `bounds` are the lanes' row ranges, in order, and cover all rows. The parts may share
        memory with `cache`, which must not change before `merge`.

        Raises:
            SplitError: this cache holds something that cannot be split.
        """

    def merge(self, parts: Sequence[Any], whole: Any | None) -> Any:
        """Merge parts into `whole` and return it; into a new cache if `whole` is None.

        A new cache shares no memory with its parts. The parts come from one cache, in any order and number.

        Raises:
            SplitError: the parts do not fit together. `whole` is unchanged.
        """


_splitters: dict[str, CacheSplitter] = {}


def register_splitter(kind: type | str, splitter: CacheSplitter) -> None:
    """Let arguments and outputs of class `kind` (or a qualified name, `"package.module.Class"`) be split."""
    _splitters[kind if isinstance(kind, str) else _qualified(kind)] = splitter


def splitter_for(value: object) -> CacheSplitter | None:
    """The splitter registered for the value's class or the nearest of its bases, or None."""
    for kind in type(value).__mro__:
        splitter = _splitters.get(_qualified(kind))
        if splitter is not None:
            return splitter
    return None


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# ------------------------------------------------------------------------------------------- transformers' caches


_CACHES = (
    "transformers.cache_utils.Cache",
    "transformers.models.reformer.modeling_reformer.ReformerDynamicCache",
    "transformers.models.xlstm.modeling_xlstm.xLSTMCache",
)
"""Cache classes, subclasses included. Reformer's and xLSTM's caches hold their states directly, without layers."""

_UTILS = "transformers.cache_utils."
_STATIC_LAYERS = frozenset(
    {_UTILS + "StaticLayer", _UTILS + "StaticSlidingWindowLayer", _UTILS + "StaticIndexedLayer"}
    | {_UTILS + "LinearAttentionAndStaticFullAttentionLayer"}
    | {_UTILS + "LinearAttentionAndStaticSlidingWindowAttentionLayer"}
    | {"transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLSparseStaticCacheLayer"}
)
"""Layers that write keys and values in place; the others grow them."""

_LAYERS = _STATIC_LAYERS | frozenset(
    {_UTILS + "DynamicLayer", _UTILS + "DynamicSlidingWindowLayer", _UTILS + "DynamicIndexedLayer"}
    | {_UTILS + "LinearAttentionLayer", _UTILS + "DummyLayer"}
    | {_UTILS + "LinearAttentionAndFullAttentionLayer", _UTILS + "LinearAttentionAndSlidingWindowAttentionLayer"}
    | {"transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4HCACache"}
    | {"transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4CSACache"}
    | {"transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLSparseCacheLayer"}
)
"""Layers whose rows are independent. Quantised layers are not: they scale by the largest value of the whole batch."""

_ROWS: Mapping[str, int] = {
    **dict.fromkeys(("keys", "values", "conv_states", "recurrent_states", "indexer_keys", "idx_keys"), 0),
    **dict.fromkeys(("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate", "linear_cache"), 0),
    **dict.fromkeys(("rnn_state", "states_cache", "buckets_cache"), 0),
    "indexer_position_ids": 1,
}
"""Attribute -> dimension of its tensors that has one entry per row."""

_IN_PLACE = frozenset({"conv_states", "recurrent_states", "rnn_state"})
"""Attributes that every layer writes in place."""

_FOR_ALL = frozenset(
    {"cumulative_length", "idx_cumulative_length", "indexer_cumulative_length", "seqlen_offset"}
    | {"_sliding_window_tensor"}
)
"""Attributes whose tensors are the same for all rows."""

_ROW_COUNT = "batch_size"
"""The attribute that holds the number of rows."""

_SHARED = frozenset({"config"})
"""Objects that are only read: all lanes share them."""

_SIMPLE = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
"""Exact types of most plain values; a look-up in this set is faster than `isinstance` with `PLAIN`."""


class _Place(NamedTuple):
    """The current position of a walk. The path string is built only when shown: a walk passes thousands of places.

    Attributes:
        in_static: whether it belongs to a layer of `_STATIC_LAYERS`.
        step: format string of this place's part of the path, after `parent`'s.
    """

    name: str = ""
    in_static: bool = False
    step: str | None = None
    key: object = None
    parent: _Place | None = None

    def attribute(self, name: str, in_static: bool) -> _Place:
        return _Place(name, in_static, ".{}", name, self)

    def item(self, key: object) -> _Place:
        return _Place(self.name, self.in_static, "[{!r}]", key, self)

    @property
    def path(self) -> str:
        """As a user would write it: `layers[3].keys`."""
        before = "" if self.parent is None else self.parent.path
        return f"{before}{'' if self.step is None else self.step.format(self.key)}".lstrip(".")

    @property
    def in_place(self) -> bool:
        """Whether the model writes to the tensors here, instead of making new ones."""
        return self.in_static or self.name in _IN_PLACE


class _AttributeSplitter:
    """Splits and merges objects of the classes above, attribute by attribute."""

    def split(self, cache: Any, bounds: Sequence[slice]) -> list[Any]:
        return _Cut(bounds).cut(cache, _Place())

    def merge(self, parts: Sequence[Any], whole: Any | None) -> Any:
        rows = [_rows_of(part) for part in parts]
        filled = [part for part, count in zip(parts, rows, strict=True) if count != 0] if any(rows) else parts
        join = _Join()
        merged = join.join(filled, whole, _Place())
        for write in join.writes:
            write()
        return merged


@dataclass(frozen=True)
class _Cut:
    """One walk that splits a cache. `seen`: tensors already split, because a layer may hold one under two names."""

    bounds: Sequence[slice]
    seen: dict[int, list[Tensor]] = field(default_factory=dict)

    def cut(self, value: Any, at: _Place) -> list[Any]:
        """The lanes' parts of the value at place `at`."""
        lanes = len(self.bounds)
        if isinstance(value, Tensor):
            if id(value) not in self.seen:
                self.seen[id(value)] = self._tensor(value, at)
            return self.seen[id(value)]
        if at.name == _ROW_COUNT and type(value) is int:
            self._check_rows(value, at)
            return [rows.stop - rows.start for rows in self.bounds]
        if isinstance(value, PLAIN) or at.name in _SHARED:
            return [value] * lanes
        if type(value) in (list, tuple):
            items = [self.cut(item, at.item(index)) for index, item in enumerate(value)]
            return [type(value)(own[lane] for own in items) for lane in range(lanes)]
        if type(value) is dict:
            pairs = {key: self.cut(item, at.item(key)) for key, item in value.items()}
            return [{key: own[lane] for key, own in pairs.items()} for lane in range(lanes)]
        _check_known(value, at)
        parts = [_twin(value) for _ in range(lanes)]
        in_static = _is_static(value)
        for name, item in vars(value).items():
            if type(item) in _SIMPLE and name != _ROW_COUNT:
                continue  # the new objects have it already
            for part, own in zip(parts, self.cut(item, at.attribute(name, in_static)), strict=True):
                vars(part)[name] = own
        return parts

    def _tensor(self, value: Tensor, at: _Place) -> list[Tensor]:
        if at.name in _FOR_ALL or _is_unfilled(value):
            return [value.clone() for _ in self.bounds]
        if at.name not in _ROWS:
            raise SplitError(
                f"its {at.path}, a tensor of shape {tuple(value.shape)}, may or may not have one entry per row. "
                "Register a splitter for the class of this cache (ubatch.register_splitter)."
            )
        dim = _ROWS[at.name]
        self._check_rows(value.shape[dim], at)
        own = [value.narrow(dim, rows.start, rows.stop - rows.start) for rows in self.bounds]
        return [part.clone() for part in own] if at.in_place else own

    def _check_rows(self, held: int, at: _Place) -> None:
        if held != self.bounds[-1].stop:
            raise SplitError(f"it holds {held} sequences, but the call has {self.bounds[-1].stop} rows ({at.path}).")


@dataclass(frozen=True)
class _Join:
    """One walk that merges parts. The caller's cache changes only once all parts are known to fit, by `writes`.

    Attributes:
        writes: changes to the caller's cache, still to be made.
        seen: tensors already merged, as in `_Cut`.
    """

    writes: list[Callable[[], object]] = field(default_factory=list)
    seen: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def join(self, values: Sequence[Any], whole: Any, at: _Place) -> Any:
        """The lanes' `values` merged: `whole` itself if it can hold them, else a new value."""
        first = values[0]
        if any(type(value) is not type(first) for value in values):
            raise _differ([type(value).__name__ for value in values], at)
        if isinstance(first, Tensor):
            key = (id(whole), *map(id, values))
            if key not in self.seen:
                self.seen[key] = self._tensor(values, whole if isinstance(whole, Tensor) else None, at)
            return self.seen[key]
        if at.name == _ROW_COUNT and type(first) is int:
            return sum(values)
        if isinstance(first, PLAIN) or at.name in _SHARED:
            if any(value is not first and value != first for value in values):
                raise _differ(values, at)
            return first
        if type(first) in (list, tuple):
            return self._sequence(values, whole, at)
        known = whole if type(whole) is type(first) else None
        if type(first) is dict:
            items = self._items(values, {} if known is None else known, at.item, at)
            if known is None:
                return items
            self.writes.append(lambda: (known.clear(), known.update(items)))
            return known
        merged = _twin(first) if known is None else known
        attributes = [vars(value) for value in values]
        old = {} if known is None else vars(known)
        in_static = _is_static(first)
        owned = self._items(attributes, old, lambda name: at.attribute(name, in_static), at)
        self.writes.append(lambda: vars(merged).update(owned))
        return merged

    def _sequence(self, values: Sequence[Any], whole: Any, at: _Place) -> Any:
        first = values[0]
        if any(len(value) != len(first) for value in values):
            raise _differ([f"{len(value)} items" for value in values], at)
        known = whole if type(whole) is type(first) else first[:0]
        old = itertools.chain(known, itertools.repeat(None))
        columns = enumerate(zip(zip(*values, strict=True), old, strict=False))
        joined = type(first)(self.join(own, was, at.item(index)) for index, (own, was) in columns)
        if known is not whole or isinstance(joined, tuple):
            return joined
        self.writes.append(lambda: whole.__setitem__(slice(None), joined))
        return whole

    def _items(
        self,
        values: Sequence[Mapping[Any, Any]],
        old: Mapping[Any, Any],
        place: Callable[[Any], _Place],
        at: _Place,
    ) -> dict[Any, Any]:
        keys = values[0].keys()
        if any(value.keys() != keys for value in values):
            raise _differ([list(value) for value in values], at)
        joined = {}
        for key in keys:
            own = [value[key] for value in values]
            same = type(own[0]) in _SIMPLE and key != _ROW_COUNT and own.count(own[0]) == len(own)
            joined[key] = own[0] if same else self.join(own, old.get(key), place(key))
        return joined

    def _tensor(self, values: Sequence[Tensor], whole: Tensor | None, at: _Place) -> Tensor:
        first = values[0]
        if at.name in _FOR_ALL or all(map(_is_unfilled, values)):
            if whole is None or not _is_like(whole, first, first.shape):
                return _with_marks(first.clone(), first)
            self.writes.append(lambda: _with_marks(whole.copy_(first), first))
            return whole
        dim = _ROWS.get(at.name)
        if dim is None:
            raise SplitError(f"its {at.path} is a tensor that the lanes added, with no rule to merge it.")
        shapes = {(value.dtype, value.shape[:dim], value.shape[dim + 1 :]) for value in values}
        if len(shapes) > 1:
            raise _differ([f"{value.dtype}{list(value.shape)}" for value in values], at)
        if whole is not None and not at.in_place and _is_cut_of(values, whole, dim):
            return whole  # no lane has changed it
        rows = [value.shape[dim] for value in values]
        shape = (*first.shape[:dim], sum(rows), *first.shape[dim + 1 :])
        if whole is None or not at.in_place or not _is_like(whole, first, shape):
            return _with_marks(torch.cat(list(values), dim), first)
        self.writes.extend(
            functools.partial(own.copy_, value) for own, value in zip(whole.split(rows, dim), values, strict=True)
        )
        return whole


def _check_known(value: object, at: _Place) -> None:
    """Refuse an object of a class that the walk does not know."""
    what = f"a {type(value).__name__}" + (f" (its {at.path})" if at.path else "")
    register = "register a splitter for the class of your cache (ubatch.register_splitter)."
    if _qualified(type(value)) not in _LAYERS and not isinstance(splitter_for(value), _AttributeSplitter):
        raise SplitError(
            f"a cache with {what} cannot be split: its class is unknown. Use a DynamicCache or a StaticCache with "
            f"transformers' own layers, or {register}"
        )
    if getattr(value, "offloading", False):
        raise SplitError(
            f"{what} that offloads its layers moves them on a stream of its own, which lanes cannot share. Make it "
            f"without offloading, or {register}"
        )


def _twin(value: Any) -> Any:
    """A shallow copy: a new object with the same attributes."""
    twin = object.__new__(type(value))
    vars(twin).update(vars(value))
    return twin


def _is_static(layer: object) -> bool:
    return _qualified(type(layer)) in _STATIC_LAYERS


def _is_unfilled(value: Tensor) -> bool:
    """Whether this is the empty tensor `[0]` that a lazy layer holds until its first keys are stored."""
    return value.shape == (0,)


def _is_like(whole: Tensor, part: Tensor, shape: Sequence[int]) -> bool:
    return whole.shape == tuple(shape) and whole.dtype == part.dtype and whole.device == part.device


def _is_cut_of(values: Sequence[Tensor], whole: Tensor, dim: int) -> bool:
    """Whether `values` are views of `whole` that cover all of its rows, in order."""
    rows = [value.shape[dim] for value in values]
    if values[0].data_ptr() != whole.data_ptr() or sum(rows) != whole.shape[dim]:
        return False
    return all(
        value.data_ptr() == own.data_ptr() and value.shape == own.shape and value.stride() == own.stride()
        for value, own in zip(values, whole.split(rows, dim), strict=True)
    )


def _with_marks(made: Tensor, first: Tensor) -> Tensor:
    """`made`, marked for torch.compile as having a static address if `first` is so marked."""
    vars(made).update(vars(first))
    return made


def _rows_of(value: Any, name: str = "") -> int | None:
    """Rows of the first tensor in the attribute `name` that has one entry per row; None if there is none."""
    if isinstance(value, Tensor):
        return value.shape[_ROWS[name]] if name in _ROWS and not _is_unfilled(value) else None
    if isinstance(value, PLAIN) or name in _SHARED:
        return None
    if isinstance(value, list | tuple):
        items = ((name, item) for item in value)
    elif isinstance(value, dict):
        items = ((name, item) for item in value.values())
    else:
        items = iter(vars(value).items())
    return next((rows for own, item in items if (rows := _rows_of(item, own)) is not None), None)


def _differ(values: Sequence[object], at: _Place) -> SplitError:
    return SplitError(f"the lanes disagree on its {at.path}: {', '.join(map(str, values))}.")


_splitters.update(dict.fromkeys(_CACHES, _AttributeSplitter()))
