"""One walk through a module, or through a call's arguments, that finds everything a call may change.

    attribute, item of a container         a shallow copy of all that belong to one object
    bytes, array, generator, iterator      its contents
    tensor                                 itself
    any other iterator, `threading.local`  `unreadable`: what cannot be read cannot be guarded

It visits modules, containers, all objects with attributes or slots, and what users' classes hold. Functions count by
identity alone. So do caches: lanes have their own. This project's objects, which are made for lanes, and the machinery
of torch and of logging do not count.
"""

from __future__ import annotations

import functools
import gc
import io
import itertools
import pickle
import random
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ubatch.calls.caches import splitter_for
from ubatch.calls.containers import FUNCTIONS, PLAIN, attributes_of, slots_of
from ubatch.errors import describe
from ubatch.wrapping.effects.stores import code_of, methods_read_local

SMALL_BYTES = 1 << 16
"""Most bytes of one value that are read in every call."""
_DEEP = 16
"""How deep two containers are compared."""
_MANY = 1 << 16
"""Of a container with more items, only their number is compared in every call."""
_MACHINERY = (
    *("torch._", "torch.distributed", "torch.fx", "torch.jit", "torch.cuda", "torch.utils.hooks", "torch.autograd"),
    *("logging", "threading", "concurrent.", "multiprocessing", "asyncio", "importlib"),
)
"""Modules whose objects belong to how a module runs, not to what it keeps."""
_LIBRARIES = frozenset({"torch", "transformers", "builtins", "collections", "abc", "typing", "enum", "numpy"})
"""Packages whose classes keep nothing for a user's module."""
_OURS = frozenset({"ubatch", "moe", "attention", "model_runner"})
_ROOT = Path(__file__).parents[3]
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that torch sets in every module: tables of parameters, buffers, submodules and hooks."""
_TABLES = ("_parameters", "_buffers", "_modules")
_OPAQUE: tuple[type, ...] = (
    *(ModuleType, torch.device, torch.dtype, torch.Size, Path, property, classmethod, staticmethod),
    *(weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType),
)
_IN_SCRIPTS = (Tensor, list, tuple, dict)
"""What an attribute of a scripted module may be besides plain; other classes are objects in C++."""
_HIDING = frozenset({"_queue", "_hashlib"})
"""Modules in C whose objects change, and let nobody look."""


@dataclass
class Kept:
    """Something that a call may change, and what it was.

    Attributes:
        path: where it is; of a container with a dot at its end.
        take: what it is now, in the form of `was`.
        put: puts `was` back; None where nothing can.
    """

    path: str
    take: Callable[[], Any]
    put: Callable[[Any], object] | None
    was: Any = None

    def __post_init__(self) -> None:
        self.was = self.take()

    def changed(self) -> dict[str, Any]:
        """Paths of what has changed, and what is there now."""
        path, was = self.path, self.was
        try:
            now = self.take()
        except Exception:  # it cannot be read any more
            return {path.rstrip("."): None}
        if type(now) is not dict:
            return {} if _same(now, was) else {path.rstrip("."): now}
        if list(now) == list(was):
            return {f"{path}{key}": value for key, value in now.items() if not _same(value, was[key])}
        return {f"{path}{key}": now.get(key) for key in now.keys() ^ was.keys()} or {f"{path}order": None}


def _same(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether an item is the same object as before, or a new one that says the same."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):  # FSDP gathers a sharded weight and lets it go again
        return hasattr(one, "to_local") or hasattr(other, "to_local")
    if type(one) is not type(other) or depth > _DEEP:
        return False
    if isinstance(one, (*PLAIN, set, frozenset, MethodType, torch.Size)):
        return bool(one == other or (one != one and other != other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key], depth + 1) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_same, one, other, itertools.repeat(depth + 1)))
    own = getattr(one, "__dict__", None)
    return bool(own) and not isinstance(one, nn.Module) and _same(own, other.__dict__, depth + 1)


class Walk:
    """What was found.

    Attributes:
        tensors: by path.
        kept: everything else that may change.
        holders: objects among it of which the garbage collector lists what they hold.
        keyed: dicts, of which it does not list the keys.
        counted: containers of which only the number of items is compared in every call.
        read: the rest of `kept`, which has to be read.
        scratch: holders that code of the module may change between two points.
        hooks: tables of hooks.
        unreadable: a path, and what is there that cannot be read; None if all can.
    """

    def __init__(self, *, thorough: bool = False, caches: bool = True) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.kept: list[Kept] = []
        self.holders: list[Any] = []
        self.keyed: list[Any] = []
        self.counted: list[Any] = []
        self.read: list[Kept] = []
        self.scratch: list[Any] = []
        self.hooks: list[Any] = []
        self.unreadable: tuple[str, str] | None = None
        self._thorough, self._caches = thorough, caches
        self._seen: dict[int, Any] = {}  # kept alive, so that nothing else gets its id
        self._waiting: list[tuple[str, Any, bool]] = []

    def visit(self, path: str, value: Any, *, scratch: bool = False) -> None:
        """Find what `value` consists of. `scratch`: code of the module may change it between two points."""
        self._waiting.append((path, value, scratch))
        while self._waiting:
            where, each, scratch = self._waiting.pop()
            try:
                self._visit(where, each, scratch)
            except Exception as error:
                self.unreadable = where, f"a {type(each).__name__}, which cannot be read ({describe(error)})"

    def visit_arguments(self, named: Iterable[tuple[str, Any]]) -> None:
        """Find what a call's arguments consist of."""
        for name, value in named:
            if type(value) is Tensor:
                self.tensors[name] = value
            else:
                self.visit(name, value, scratch=True)

    def _visit(self, path: str, value: Any, scratch: bool) -> None:
        kind: Any = type(value)  # not `__class__`, which a proxy may forward
        if issubclass(kind, PLAIN) or issubclass(kind, _OPAQUE) or id(value) in self._seen:
            own = getattr(value, "__dict__", None) if issubclass(kind, str | int | float | bytes) else None
            if own is not None and not issubclass(kind, Enum):
                self._keep(f"{path}.", own)
            return
        self._seen[id(value)] = value
        prefix = f"{path}." if path else ""
        if issubclass(kind, Tensor):
            while path in self.tensors:  # of a dict with the keys 1 and "1", say
                path += "'"
            self.tensors[path] = value
            if value.is_leaf and value.grad is not None:
                self._later(f"{prefix}grad", value.grad)
            if self._thorough:  # without what torch's compiler sets
                self.kept.append(Kept(prefix, functools.partial(attributes_of, value), None))
            elif any(not name.startswith("_") for name in value.__dict__):
                self._keep(prefix, value.__dict__)
        elif issubclass(kind, nn.Module):
            self._visit_module(prefix, value, scratch)
        elif kind is MethodType:
            self._later(f"{prefix}__self__", value.__self__, scratch)
        elif kind is functools.partial:
            self._later(path, (value.func, value.args, value.keywords), scratch)
        elif issubclass(kind, threading.local):
            self.unreadable = path, "a threading.local, which is another one in every lane"
        elif issubclass(kind, FUNCTIONS) or (not self._caches and splitter_for(value) is not None):
            return
        elif (reading := _reading_of(value, thorough=self._thorough)) is not None:
            self._read(path, *reading)
        elif kind.__module__ in _HIDING or (
            issubclass(kind, Iterator) and kind.__module__ in ("builtins", "itertools")
        ):
            self.unreadable = path, f"a {kind.__name__}, of which nobody can tell where it is"
        elif _where_from(kind) not in ("machinery", "ours"):
            self._visit_object(prefix, value, scratch)

    def _later(self, path: str, value: Any, scratch: bool = False) -> None:
        self._waiting.append((path, value, scratch))

    def _visit_object(self, prefix: str, value: Any, scratch: bool) -> None:
        """Visit a container or any other object."""
        if _where_from(_class_of(value)) == "user" and (local := methods_read_local(_class_of(value))) is not None:
            self.unreadable = prefix.rstrip("."), f"reading {local!r}, a threading.local"
        own, children = getattr(value, "__dict__", None), self._keep_slots(prefix, value, scratch)
        if isinstance(value, dict | list | deque | set):
            self._keep(prefix, value, scratch, table=True)
            self.keyed += [value] if isinstance(value, dict) else []
        if isinstance(own, dict):
            self._keep(prefix, own, scratch)
            children += own.items()
        if isinstance(value, MappingProxyType):
            children += [("", gc.get_referents(value)[0])]
        elif isinstance(value, Mapping):
            children += value.items()
            children += [(f"key {key!r:.20}", key) for key in value if not isinstance(key, PLAIN)]
        elif isinstance(value, list | tuple | deque | set | frozenset):
            children += enumerate(value)
        for name, child in children:
            self._later(f"{prefix}{name}", child, scratch)

    def _visit_module(self, prefix: str, module: nn.Module, scratch: bool) -> None:
        """Visit a module. `scratch`: code of the module that it belongs to sets attributes."""
        own, where = vars(module), _where_from(_class_of(module))
        if isinstance(module, torch.jit.ScriptModule):
            self._visit_scripted(prefix, own.get("_actual_script_module", module))
            return
        if "_parameters" not in own:  # a wrapper stands in for its module
            self._later(prefix.rstrip("."), own.get("_ubatch_model"))
            return
        of_user = where == "user"
        stores, local = code_of(module) if of_user else (False, None)
        scratch = scratch or stores
        children = [item for name in _TABLES for item in own[name].items()]
        if where != "ours":
            if local is not None:
                self.unreadable = f"{prefix}forward", f"reading {local!r}, a threading.local"
            self.hooks += [table for name, table in own.items() if name.endswith("_hooks") and isinstance(table, dict)]
            linear = _is_linear(module, own)
            children += self._keep_slots(prefix, module, scratch)
            self._keep(prefix, own, scratch, counted=linear)
            for name in _TABLES if not linear else ("_parameters",):
                self._keep(prefix, own[name], table=True)
            children += [item for item in own.items() if item[0] not in _OF_TORCH]
            self.holders += [] if linear else [module]  # for its class
            put = functools.partial(setattr, module, "__class__")
            self.kept.append(Kept(f"{prefix}__class__", functools.partial(type, module), put))
        for each in type(module).__mro__ if of_user else ():
            if _where_from(each) == "user" and id(each) not in self._seen:
                self._seen[id(each)] = each
                self._keep(prefix, each)
                children += [item for item in vars(each).items() if not item[0].startswith("__")]
        for name, child in children:
            self._later(f"{prefix}{name}", child, scratch if isinstance(child, nn.Module) else of_user)

    def _visit_scripted(self, prefix: str, module: Any) -> None:
        """Visit a module that is compiled by torch.jit, whose attributes lie in C++."""
        names = [*module._concrete_type.get_attributes()]

        def take() -> dict[str, Any]:
            found = {name: module._c.getattr(name) for name in names}
            return {name: value for name, value in found.items() if isinstance(value, (*PLAIN, *_IN_SCRIPTS))}

        def put(was: dict[str, Any]) -> None:
            for name, value in was.items():
                module._c.setattr(name, value)

        self._read(prefix, take, put)
        tensors = [item for item in self.kept[-1].was.items() if isinstance(item[1], Tensor)]
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, child in (*tensors, *own, *module.named_children()):
            self._later(f"{prefix}{name}", child)

    def _read(self, path: str, take: Callable[[], Any], put: Callable[[Any], object] | None) -> None:
        """Keep what has to be read to be compared."""
        self.read.append(Kept(path, take, put))
        self.kept.append(self.read[-1])

    def _keep_slots(self, prefix: str, value: Any, scratch: bool) -> list[tuple[Any, Any]]:
        """Take a shallow copy of what an object has in slots; returns it."""
        if slots_of(value):
            put = functools.partial(_put_attributes, value)
            self.kept.append(Kept(prefix, functools.partial(_slots_in, value), put))
            self.holders.append(value)
            self.scratch += [value] if scratch else []
        return [*_slots_in(value).items()]

    def _keep(
        self, prefix: str, holder: Any, scratch: bool = False, *, table: bool = False, counted: bool = False
    ) -> None:
        """Take a shallow copy of an object's attributes or, of a `table`, of its items. `counted`: see there."""
        put = functools.partial(_put_attributes if isinstance(holder, type) else _put_items, holder)
        self.kept.append(Kept(prefix, functools.partial(_items_of, holder), put))
        if isinstance(holder, type):
            holder = gc.get_referents(holder.__dict__)[0]
        if counted or (table and len(holder) > _MANY):
            self.counted.append(holder)
            return
        self.holders.append(holder)
        self.scratch += [holder] if scratch else []


# ---------------------------------------------------------------------------------------------------- kinds of objects


def _class_of(value: object) -> Any:
    return type(value)


@functools.lru_cache(4096)
def _where_from(kind: Any) -> str:
    """Whose class this is: "ours", of the "machinery", of a "library", or a "user"'s."""
    name = kind.__module__
    package = name.partition(".")[0]
    if package in _OURS:
        file = getattr(sys.modules.get(name), "__file__", None)
        return "ours" if file is not None and _ROOT in Path(file).parents else "user"
    return "machinery" if name.startswith(_MACHINERY) else "library" if package in _LIBRARIES else "user"


_LINEAR = frozenset({"training", "in_features", "out_features"})


def _is_linear(module: nn.Module, own: Mapping[str, Any]) -> bool:
    """Whether this is torch's own linear layer, with nothing else on it. Most layers of a model are, and what it says
    of itself is only for show."""
    plain = own.keys() - _OF_TORCH <= _LINEAR and not own["_buffers"] and not own["_modules"]
    return type(module) is nn.Linear and plain


def _reading_of(value: Any, *, thorough: bool) -> tuple[Callable[[], Any], Callable[[Any], object] | None] | None:
    """How to read a value that has no items or attributes, and how to put back what was read; None if it is no such
    value."""
    kind: Any = type(value)
    if issubclass(kind, torch.Generator):
        return lambda: value.get_state().tolist(), lambda was: value.set_state(torch.ByteTensor(was))
    if issubclass(kind, random.Random):
        return (value.getstate, value.setstate) if kind is not random.SystemRandom else (lambda: None, None)
    if kind.__module__.startswith("numpy.random") and hasattr(value, "bit_generator"):
        bits = value.bit_generator
        return lambda: pickle.dumps(bits.state), lambda was: setattr(bits, "state", pickle.loads(was))
    if kind.__module__.startswith("numpy.random") and hasattr(value, "get_state"):
        return lambda: pickle.dumps(value.get_state()), lambda was: value.set_state(pickle.loads(was))
    if issubclass(kind, io.StringIO | io.BytesIO):
        return value.__getstate__, value.__setstate__
    if kind is itertools.count:
        return lambda: repr(value), None
    if issubclass(kind, Iterator) and kind.__module__ == "builtins" and hasattr(value, "__setstate__"):
        return value.__reduce__, lambda was: value.__setstate__(was[2])
    if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
        if value.nbytes > SMALL_BYTES and not thorough:
            return lambda: value.nbytes, None
        if value.dtype.hasobject:
            return lambda: pickle.dumps(value), None
        return value.tobytes, lambda was: value.__setitem__(..., type(value)(value.shape, value.dtype, was))
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
    else:
        memoryview(value).cast("B")[:] = was


def _items_of(holder: Any) -> Any:
    """A shallow copy: a dict of attributes or of a dict's items, else a list or set."""
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, list | deque):
        return list(holder)
    return dict(vars(holder)) if isinstance(holder, type) else set(holder)


def _slots_in(holder: Any) -> dict[str, Any]:
    return {name: getattr(holder, name) for name in slots_of(holder) if hasattr(holder, name)}


def _put_items(holder: Any, was: Any) -> None:
    """Give a container the items of `_items_of` again. Its own methods may refuse, or do more than that."""
    kind: Any
    for kind in (OrderedDict, dict, set, list, deque):
        if isinstance(holder, kind):
            kind.clear(holder)
            (kind.extend if kind in (list, deque) else kind.update)(holder, was)
            return


def _put_attributes(holder: Any, was: Mapping[str, Any]) -> None:
    """Give a class or an object with slots its attributes again."""
    now = _items_of(holder) if isinstance(holder, type) else _slots_in(holder)
    for name in now.keys() - was.keys():
        delattr(holder, name)
    for name, value in was.items():
        if now.get(name, was) is not value:
            setattr(holder, name, value)
