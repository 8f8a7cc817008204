"""Splitting and merging of caches: arguments that a model changes in place.

A cache is an object, not a tensor, so its class needs a splitter. Users register one with `register_splitter`;
transformers' caches are registered here by qualified name, so this package never imports transformers. All of them are
split in one way: by a walk through their attributes and those of their layers.

    tensor with one entry per row     a lane gets its rows: a view where the model grows it (a new tensor per step),
                                      a copy where the model writes to it in place
    other tensor (a length)           every lane gets a copy of its own
    number, flag, name, class         the same for all lanes, before and after
    dict, list, tuple                 item by item

A layer of another package, and a tensor in an attribute that is not known here, or an empty layer's attribute that may
become one, are refused by name when the cache is split, before the model runs.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ubatch.calls.containers import PLAIN
from ubatch.errors import SplitError


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

_IN_PLACE = frozenset({"conv_states", "recurrent_states", "rnn_state"})
"""Attributes that every layer writes in place."""

_GROWN = frozenset(
    {"keys", "values", "indexer_keys", "idx_keys", "buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv"}
    | {"overlap_gate", "linear_cache", "states_cache", "buckets_cache"}
)
"""Attributes that all but static layers grow, along another dimension than 0."""

_ROWS = {**dict.fromkeys(_IN_PLACE | _GROWN, 0), "indexer_position_ids": 1}
"""Attribute -> dimension of its tensors that has one entry per row."""

_FOR_ALL = frozenset(
    {"cumulative_length", "idx_cumulative_length", "indexer_cumulative_length", "seqlen_offset"}
    | {"_sliding_window_tensor"}
)
"""Attributes whose tensors are the same for all rows."""

_LATER = frozenset({*_ROWS, *_FOR_ALL, "dtype", "device"})
"""Attributes of an empty layer that may be None."""

_ROW_COUNT = "batch_size"
"""The attribute that holds the number of rows."""

_SHARED = frozenset({"config"})
"""Objects that are only read: all lanes share them."""

_CONTAINERS = (list, tuple, dict)

_SIMPLE = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
"""Exact types of most plain values; a look-up in this set is faster than `isinstance` with `PLAIN`."""


_REGISTER = "register a splitter for the class of your cache (ubatch.register_splitter)."

_Place = tuple[str, bool, str]
"""The position of a walk: the attribute, whether the model writes in place to the tensors there, and the way there as a
user would write it: `layers[3].keys`. A plain tuple: a walk passes thousands of places."""

_START: _Place = ("", False, "")


class _AttributeSplitter:
    """Splits and merges objects of the classes above, attribute by attribute."""

    def split(self, cache: Any, bounds: Sequence[slice]) -> list[Any]:
        return list(_Cut(bounds).cut(cache, _START))

    def merge(self, parts: Sequence[Any], whole: Any | None) -> Any:
        rows = [_rows_of(part) for part in parts]
        filled = [part for part, count in zip(parts, rows, strict=True) if count != 0] if any(rows) else parts
        join = _Join()
        merged = join.join(filled, whole, _START)
        for write in join.writes:
            write()
        return merged


class _Cut:
    """One walk that splits a cache.

    Attributes:
        sizes: the lanes' numbers of rows.
        together: attributes whose parts one operator makes for all lanes, unless the layer is static.
        seen: tensors already split, because a layer may hold one under two names.
    """

    def __init__(self, bounds: Sequence[slice]) -> None:
        self.bounds = bounds
        self.sizes = [rows.stop - rows.start for rows in bounds]
        # Autograd refuses writes to views that one operator made together.
        together = 0 < sum(self.sizes) == bounds[-1].stop and not torch.is_grad_enabled()
        self.together = _GROWN if together else frozenset()
        self.seen: dict[int, Sequence[Tensor]] = {}

    def cut(self, value: Any, at: _Place) -> Sequence[Any]:
        """The lanes' parts of the value at place `at`."""
        kind: Any = type(value)
        if (in_static := _is_static(kind)) is not None:
            if not getattr(value, "is_initialized", True):
                _refuse_unknown(value, at)
            return self._object(value, in_static, at)
        if isinstance(value, Tensor):
            if id(value) not in self.seen:
                self.seen[id(value)] = self._tensor(value, at)
            return self.seen[id(value)]
        if at[0] == _ROW_COUNT and kind is int:
            self._check_rows(value, at)
            return self.sizes
        if isinstance(value, PLAIN) or at[0] in _SHARED:
            return [value] * len(self.sizes)
        if kind in _CONTAINERS:
            owned = {key: self.cut(item, _within(at, key)) for key, item in _items_of(value).items()}
            lanes = [{key: own[lane] for key, own in owned.items()} for lane in range(len(self.sizes))]
            return lanes if kind is dict else [kind(own.values()) for own in lanes]
        if not isinstance(splitter_for(value), _AttributeSplitter):
            raise SplitError(
                f"a cache with {_named(value, at)} cannot be split: its class is unknown. Use a DynamicCache or a "
                f"StaticCache with transformers' own layers, or {_REGISTER}"
            )
        return self._object(value, False, at)

    def _object(self, value: Any, in_static: bool, at: _Place) -> list[Any]:
        if getattr(value, "offloading", False):
            raise SplitError(
                f"{_named(value, at)} that offloads its layers moves them on a stream of its own, which lanes cannot "
                f"share. Make it without offloading, or {_REGISTER}"
            )
        seen, sizes, rows = self.seen, self.sizes, self.bounds[-1].stop
        together = frozenset() if in_static else self.together
        owned: dict[str, Sequence[Any]] = {}
        for name, item in vars(value).items():
            if name in together and type(item) is Tensor and id(item) not in seen and item.shape[0] == rows:
                # Nearly all tensors come this way. "Unsafe" means that these views have version counters of their own.
                owned[name] = seen[id(item)] = item.unsafe_split_with_sizes(sizes)
            elif type(item) not in _SIMPLE or name == _ROW_COUNT:  # the new objects have the others already
                owned[name] = self.cut(item, _within(at, name, in_static))
        parts = [object.__new__(type(value)) for _ in sizes]
        for lane, part in enumerate(parts):
            state = vars(value).copy()
            for name, own in owned.items():
                state[name] = own[lane]
            object.__setattr__(part, "__dict__", state)  # not through a `__setattr__` of a user's class
        return parts

    def _tensor(self, value: Tensor, at: _Place) -> list[Tensor]:
        name, in_place, path = at
        if name in _FOR_ALL or _is_unfilled(value):
            return [value.clone() for _ in self.bounds]
        if name not in _ROWS:
            raise SplitError(
                f"its {path}, a tensor of shape {tuple(value.shape)}, may or may not have one entry per row. "
                "Register a splitter for the class of this cache (ubatch.register_splitter)."
            )
        dim = _ROWS[name]
        self._check_rows(value.shape[dim], at)
        own = [value.narrow(dim, rows.start, rows.stop - rows.start) for rows in self.bounds]
        return [part.clone() for part in own] if in_place else own

    def _check_rows(self, held: int, at: _Place) -> None:
        if held != self.bounds[-1].stop:
            raise SplitError(f"it holds {held} sequences, but the call has {self.bounds[-1].stop} rows ({at[2]}).")


class _Join:
    """One walk that merges parts. The caller's cache changes only once all parts are known to fit, by `writes`.

    Attributes:
        writes: changes to the caller's cache, still to be made.
        seen: tensors already merged, as in `_Cut`.
    """

    def __init__(self) -> None:
        self.writes: list[Callable[[], object]] = []
        self.seen: dict[tuple[int, ...], Tensor] = {}

    def join(self, values: Sequence[Any], whole: Any, at: _Place) -> Any:
        """The lanes' `values` merged: `whole` itself if it can hold them, else a new value."""
        first = values[0]
        kind: Any = type(first)
        if len(set(map(type, values))) > 1:
            raise _differ([type(value).__name__ for value in values], at)
        if isinstance(first, Tensor):
            key = (id(whole), *map(id, values))
            if key not in self.seen:
                self.seen[key] = self._tensor(values, whole if isinstance(whole, Tensor) else None, at)
            return self.seen[key]
        if at[0] == _ROW_COUNT and kind is int:
            return sum(values)
        in_static = _is_static(kind)
        if in_static is None and (isinstance(first, PLAIN) or at[0] in _SHARED):
            if any(value is not first and value != first for value in values):
                raise _differ(values, at)
            return first
        return self._items(values, whole if type(whole) is kind else None, at, in_static)

    def _items(self, values: Sequence[Any], whole: Any, at: _Place, in_static: bool | None) -> Any:
        """Containers or objects merged, item by item."""
        kind: Any = type(values[0])
        held, old = [_items_of(value) for value in values], {} if whole is None else _items_of(whole)
        keys = [own.keys() for own in held]
        if keys.count(keys[0]) < len(keys):
            raise _differ([list(own) for own in keys], at)
        within = None if kind in _CONTAINERS else bool(in_static)
        items = {}
        for key, item in held[0].items():
            own = [each[key] for each in held]
            same = type(item) in _SIMPLE and key != _ROW_COUNT and own.count(item) == len(own)
            items[key] = item if same else self.join(own, old.get(key), _within(at, key, within))
        if kind is tuple:
            return tuple(items.values())
        merged = whole if whole is not None else kind() if kind in _CONTAINERS else object.__new__(kind)
        if kind is list:
            self.writes.append(lambda: merged.__setitem__(slice(None), items.values()))
        elif kind is dict:
            self.writes.append(lambda: (merged.clear(), merged.update(items)))
        else:
            self.writes.append(lambda: vars(merged).update(items))
        return merged

    def _tensor(self, values: Sequence[Tensor], whole: Tensor | None, at: _Place) -> Tensor:
        first, (name, in_place, path) = values[0], at
        if name in _FOR_ALL or (_is_unfilled(first) and all(map(_is_unfilled, values))):
            if whole is None or not _is_like(whole, first, first.shape):
                return _with_marks(first.clone(), first)
            self.writes.append(lambda: _with_marks(whole.copy_(first), first))
            return whole
        dim = _ROWS.get(name)
        if dim is None:
            raise SplitError(f"its {path} is a tensor that the lanes added, with no rule to merge it.")
        alike = len({(value.dtype, value.shape) for value in values}) == 1
        if not alike and len({(value.dtype, value.shape[:dim], value.shape[dim + 1 :]) for value in values}) > 1:
            raise _differ([f"{value.dtype}{list(value.shape)}" for value in values], at)
        if whole is not None and not in_place and _is_cut_of(values, whole, dim):
            return whole  # no lane has changed it
        if whole is not None and in_place:
            rows = [value.shape[dim] for value in values]
            if _is_like(whole, first, (*first.shape[:dim], sum(rows), *first.shape[dim + 1 :])):
                owned = zip(whole.split(rows, dim), values, strict=True)
                self.writes.extend(functools.partial(own.copy_, value) for own, value in owned)
                return whole
        return _with_marks(torch.cat(list(values), dim), first)


def _within(at: _Place, key: Any, in_static: bool | None = None) -> _Place:
    """The place of an attribute, of a static layer or not, or of an item if `in_static` is None."""
    if in_static is None:
        return at[0], at[1], f"{at[2]}[{key!r}]"
    return key, in_static or key in _IN_PLACE, f"{at[2]}.{key}" if at[2] else key


def _named(value: object, at: _Place) -> str:
    return f"a {type(value).__name__}" + (f" (its {at[2]})" if at is not _START else "")


@functools.lru_cache(1024)
def _is_static(kind: Any) -> bool | None:
    """Whether layers of this class write keys and values in place, which they do to be compiled; None if it is no layer
    of transformers' own whose rows can be reordered. Quantised layers scale by the largest value of the whole batch."""
    own = kind.__module__.startswith("transformers.") and hasattr(kind, "reorder_cache")
    static = getattr(kind, "is_compileable", None)  # a cache has a property of that name
    return static if own and isinstance(static, bool) and not hasattr(kind, "_quantize") else None


def _refuse_unknown(layer: Any, at: _Place) -> None:
    """Refuse an empty layer with an attribute that may become a tensor of which it is not known whether it has rows."""
    for name, item in vars(layer).items():
        if item is None and name not in _LATER:
            raise SplitError(f"its {_within(at, name, False)[2]} may get one entry per row, or not: {_REGISTER}")


def _items_of(value: Any) -> Mapping[Any, Any]:
    """Items of a container by key or place; attributes of any other object."""
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if isinstance(value, list | tuple) else vars(value)


def _is_unfilled(value: Tensor) -> bool:
    """Whether this is the empty tensor `[0]` that a lazy layer holds until its first keys are stored."""
    return value.shape == (0,)


def _is_like(whole: Tensor, part: Tensor, shape: Sequence[int]) -> bool:
    return whole.shape == tuple(shape) and whole.dtype == part.dtype and whole.device == part.device


def _is_cut_of(values: Sequence[Tensor], whole: Tensor, dim: int) -> bool:
    """Whether `values` are views of `whole` that cover all of its rows, in order."""
    if values[0].data_ptr() != whole.data_ptr():
        return False
    rows = [value.shape[dim] for value in values]
    return sum(rows) == whole.shape[dim] and all(
        value.data_ptr() == own.data_ptr() and value.shape == own.shape and value.stride() == own.stride()
        for value, own in zip(values, whole.split(rows, dim), strict=True)
    )


def _with_marks(made: Tensor, first: Tensor) -> Tensor:
    """`made`, marked for torch.compile as having a static address if `first` is so marked."""
    if marks := vars(first):
        vars(made).update(marks)
    return made


def _rows_of(value: Any, name: str = "") -> int | None:
    """Rows of the first tensor in the attribute `name` that has one entry per row; None if there is none."""
    if isinstance(value, Tensor):
        return value.shape[_ROWS[name]] if name in _ROWS and not _is_unfilled(value) else None
    if isinstance(value, PLAIN) or name in _SHARED:
        return None
    in_container = type(value) in _CONTAINERS
    found = (_rows_of(item, name if in_container else own) for own, item in _items_of(value).items())
    return next((rows for rows in found if rows is not None), None)


def _differ(values: Sequence[object], at: _Place) -> SplitError:
    return SplitError(f"the lanes disagree on its {at[2]}: {', '.join(map(str, values))}.")


_splitters.update(dict.fromkeys(_CACHES, _AttributeSplitter()))
