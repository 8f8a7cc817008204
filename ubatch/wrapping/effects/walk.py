"""One walk through a module, or through a call's arguments, that finds everything a call may change.

    attribute, item of a container         a shallow copy of all that belong to one object
    bytes, array, generator, iterator      its contents
    tensor                                 itself
    any other iterator, `threading.local`  `unreadable`: what cannot be read cannot be guarded

It visits modules, containers and all objects with attributes or slots. Functions count by identity alone. So do caches:
lanes have their own. This project's objects, which are made for lanes, and torch's machinery do not count.
"""

from __future__ import annotations

import functools
import gc
import itertools
import pickle
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ubatch.calls.caches import splitter_for
from ubatch.calls.containers import FUNCTIONS, PLAIN
from ubatch.wrapping.effects.stores import Stores, stores_of

__all__ = ["SMALL_BYTES", "Kept", "Walk"]

SMALL_BYTES = 1 << 16
"""Most bytes of one value that are read in every call."""
_MANY = 4096
"""Of a container with more items, only their number is compared in every call."""
_MACHINERY = (
    "torch._",
    "torch.distributed",
    "torch.fx",
    "torch.jit",
    "torch.cuda",
    "torch.utils.hooks",
    "torch.autograd",
)
"""Modules of torch whose objects belong to how a module runs, not to what it keeps."""
_LIBRARIES = frozenset({"torch", "transformers", "builtins", "collections", "abc", "typing"})
"""Packages whose classes keep nothing for a user's module."""
_OURS = frozenset({"ubatch", "moe", "attention", "model_runner"})
_ROOT = Path(__file__).parents[3]
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that torch sets in every module: tables of parameters, buffers, submodules and hooks."""
_TABLES = ("_parameters", "_buffers", "_modules")
_OPAQUE = (ModuleType, torch.device, torch.dtype, torch.Size, Path)
_NO_STORES = Stores(frozenset(), False, None)


class Kept(NamedTuple):
    """Something that a call may change, and what it was.

    Attributes:
        path: where it is; of a container with a dot at its end.
        take: what it is now, in the form of `was`.
        put: puts `was` back; None where nothing can.
    """

    path: str
    take: Callable[[], Any]
    put: Callable[[Any], object] | None
    was: Any


class Walk:
    """What was found.

    Attributes:
        tensors: by path.
        kept: everything else that may change.
        holders: containers among it, whose items the garbage collector lists.
        keyed: dicts, of which it does not list the keys.
        counted: containers with so many items that only their number is compared in every call.
        read: the rest of `kept`, which has to be read.
        scratch: containers that code of the module may change in a call.
        hooks: tables of hooks.
        unreadable: a path, and what is there that cannot be read; None if all can.
    """

    def __init__(self, *, thorough: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.kept: list[Kept] = []
        self.holders: list[Any] = []
        self.keyed: list[Any] = []
        self.counted: list[Any] = []
        self.read: list[Kept] = []
        self.scratch: list[Any] = []
        self.hooks: list[Any] = []
        self.unreadable: tuple[str, str] | None = None
        self._thorough = thorough
        self._seen: dict[int, Any] = {}  # kept alive, so that nothing else gets its id
        self._stores = _NO_STORES

    def visit(self, path: str, value: Any) -> None:
        """Find what `value` is made of."""
        if isinstance(value, PLAIN) or id(value) in self._seen or isinstance(value, _OPAQUE):
            return
        self._seen[id(value)] = value
        prefix = f"{path}." if path else ""
        if isinstance(value, Tensor):
            self.tensors[path] = value
            if value.is_leaf and value.grad is not None:
                self.visit(f"{prefix}grad", value.grad)
        elif isinstance(value, nn.Module):
            self._visit_module(prefix, value)
        elif isinstance(value, MethodType):
            self.visit(f"{prefix}__self__", value.__self__)
        elif isinstance(value, functools.partial):
            self.visit(path, (value.func, value.args, value.keywords))
        elif isinstance(value, threading.local):
            self.unreadable = path, "a threading.local, which is another one in every lane"
        elif isinstance(value, FUNCTIONS) or splitter_for(value) is not None:
            return
        elif (reading := _reading_of(value, thorough=self._thorough)) is not None:
            self.read.append(Kept(path, *reading, reading[0]()))
            self.kept.append(self.read[-1])
        elif isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            self.unreadable = path, f"a {type(value).__name__}, whose place cannot be read"
        else:
            self._visit_object(prefix, value)

    def _visit_object(self, prefix: str, value: Any) -> None:
        """Visit a container or any other object."""
        where, slots = _where_from(_class_of(value)), _slots_of(_class_of(value))
        if where in ("machinery", "ours"):
            return
        if isinstance(value, dict | list | deque | set):
            self._keep(prefix, value, table=True)
            self.keyed += [value] if isinstance(value, dict) else []
        if slots:
            self._keep(prefix, value)
        children: list[tuple[Any, Any]] = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self._keep(prefix, own)
            children += own.items()
        if isinstance(value, Mapping):
            children += value.items()
        elif isinstance(value, list | tuple | deque | set | frozenset):
            children += enumerate(value)
        for name, child in children:
            self.visit(f"{prefix}{name}", child)

    def _visit_module(self, prefix: str, module: nn.Module) -> None:
        own, where, before = vars(module), _where_from(_class_of(module)), self._stores
        children = [item for name in _TABLES for item in own[name].items()]
        if where != "ours":
            self._stores = stores_of(module) if where == "user" else _NO_STORES
            if self._stores.local is not None:
                self.unreadable = f"{prefix}forward", f"reading {self._stores.local!r}, a threading.local"
            self.hooks += [table for name, table in own.items() if name.endswith("_hooks") and isinstance(table, dict)]
            self._keep(prefix, own, counted=_is_plain_layer(_class_of(module), frozenset(own)))
            for name in _TABLES:
                self._keep(prefix, own[name], table=True)
            for kind in type(module).__mro__ if where == "user" else ():
                if _where_from(kind) == "user" and id(kind) not in self._seen:
                    self._seen[id(kind)] = kind
                    self._keep(prefix, kind)
            children += [item for item in own.items() if item[0] not in _OF_TORCH]
        for name, child in children:
            self.visit(f"{prefix}{name}", child)
        self._stores = before

    def _keep(self, prefix: str, holder: Any, *, table: bool = False, counted: bool = False) -> None:
        """Take a shallow copy of an object's attributes or, of a `table`, of its items. `counted`: see `counted`."""
        take = functools.partial(_items_of, holder)
        self.kept.append(Kept(prefix, take, functools.partial(_put_items, holder), take()))
        if isinstance(holder, type):
            holder = gc.get_referents(holder.__dict__)[0]
        if counted or (table and len(holder) > _MANY):
            self.counted.append(holder)
            return
        self.holders.append(holder)
        if self._stores.items if table else self._stores.names:
            self.scratch.append(holder)


# ---------------------------------------------------------------------------------------------------- kinds of objects


def _class_of(value: object) -> Any:
    return type(value)


@functools.lru_cache(4096)
def _where_from(kind: Any) -> str:
    """Whose class this is: "ours", of torch's "machinery", of a "library", or a "user"'s."""
    name = kind.__module__
    package = name.partition(".")[0]
    if package in _OURS:
        file = getattr(sys.modules.get(name), "__file__", None)
        return "ours" if file is not None and _ROOT in Path(file).parents else "user"
    return "machinery" if name.startswith(_MACHINERY) else "library" if package in _LIBRARIES else "user"


@functools.lru_cache(4096)
def _slots_of(kind: Any) -> tuple[str, ...]:
    names: list[str] = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if not name.startswith("__"))


@functools.lru_cache(1024)
def _is_plain_layer(kind: Any, names: frozenset[str]) -> bool:
    """Whether this is a layer of torch's own with nothing but its own settings, as most layers of a model are."""
    known = {"training", *getattr(kind, "__constants__", ())}.union(
        *(vars(each).get("__annotations__", ()) for each in kind.__mro__)
    )
    return kind.__module__.startswith("torch.nn.modules.") and names - _OF_TORCH <= known


def _reading_of(value: Any, *, thorough: bool) -> tuple[Callable[[], Any], Callable[[Any], object] | None] | None:
    """How to read a value that has no items or attributes, and how to put back what was read; None if it is no such
    value."""
    if isinstance(value, torch.Generator):
        return lambda: value.get_state().tolist(), lambda was: value.set_state(torch.ByteTensor(was))
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if type(value).__module__.startswith("numpy.random"):
        return lambda: pickle.dumps(value), None
    if isinstance(value, itertools.count):
        return lambda: repr(value), None
    if isinstance(value, Iterator) and type(value).__module__ == "builtins" and hasattr(value, "__setstate__"):
        return value.__reduce__, None
    try:
        large = memoryview(value).nbytes > SMALL_BYTES
    except (TypeError, ValueError, BufferError):
        return None
    if large and not thorough:
        return lambda: memoryview(value).nbytes, None
    return lambda: memoryview(value).tobytes(), functools.partial(_put_bytes, value)


def _put_bytes(value: Any, was: bytes) -> None:
    if isinstance(value, bytearray):
        value[:] = was
    elif memoryview(value).tobytes() != was:
        memoryview(value).cast("B")[:] = was


def _items_of(holder: Any) -> Any:
    """A shallow copy: a dict of attributes or of a dict's items, else a list or set."""
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, list | deque):
        return list(holder)
    if isinstance(holder, set):
        return set(holder)
    if isinstance(holder, type):
        return dict(vars(holder))
    return {name: getattr(holder, name) for name in _slots_of(_class_of(holder)) if hasattr(holder, name)}


def _put_items(holder: Any, was: Any) -> None:
    """Give a container or object the items of `_items_of` again, if it has others now."""
    now = _items_of(holder)
    if len(now) == len(was) and all(map(is_, _flat(now), _flat(was))):
        return
    if isinstance(holder, dict | set):
        holder.clear()
        holder.update(was)
    elif isinstance(holder, list | deque):
        holder.clear()
        holder.extend(was)
    else:
        for name in now.keys() - was.keys():
            delattr(holder, name)
        for name, value in was.items():
            if now.get(name, was) is not value:
                setattr(holder, name, value)


def _flat(items: Any) -> Iterable[Any]:
    return itertools.chain.from_iterable(items.items()) if isinstance(items, dict) else items
