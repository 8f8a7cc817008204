"""What a call may change, of the module or of its arguments: one walk finds it, one comparison, one way back.

    what is kept                       noticed by                               put back
    attribute, item of a container     being another object, or another value   from a shallow copy
    array, bytes, generator            its contents                             from a copy
    small tensor                       version counter, contents in a proof     from a copy, up to `_SMALL_BYTES`
    large tensor                       version counter, contents in a proof     nowhere: `restore` names it
    any iterator, `threading.local`    cannot be read: `unreadable` names it

The walk visits modules, containers, and all objects with attributes or slots. It knows functions and classes of other
packages only by identity, and of this project's and torch's machinery only the tensors. A snapshot costs little, since
the garbage collector can list the items of all containers in one call. Writes through `.data`, numpy or a foreign
kernel move no version counter, and inference tensors have none: of these, only small buffers are compared by contents.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import pickle
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter, is_
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ubatch.calls.caches import splitter_for
from ubatch.calls.containers import FUNCTIONS, PLAIN
from ubatch.wrapping.stores import Stores, stores_of

__all__ = ["State"]

_BLOCK = 1024
_SMALL_BYTES = 1 << 16
"""Largest tensor of which a copy is kept, and most bytes that are compared by contents in every call."""
_MANY = 4096
"""Of a container with more items, only their number is compared in every call."""
_MOST_COMPARED = 16
"""Most tensors that are compared by contents in every call."""
_DEEP = 16
"""How deep two containers are compared."""
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
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that torch sets in every module: tables of parameters, buffers, submodules and hooks."""
_TABLES = ("_parameters", "_buffers", "_modules")
_OPAQUE = (ModuleType, torch.device, torch.dtype, torch.Size, Path)
_NOTHING = Stores(frozenset(), False, None)
_version, _requires_grad = attrgetter("_version"), attrgetter("requires_grad")


class _Kept(NamedTuple):
    """A container with a shallow copy of its items."""

    path: str
    holder: Any
    copy: Any


class _Read(NamedTuple):
    """A value that is compared by `get()`, and put back by `put(value)`; `put` is None where nothing can."""

    path: str
    get: Callable[[], Any]
    put: Callable[[Any], object] | None


class State:
    """A snapshot of what was given to `module` or `call`.

    Args:
        thorough: compare the contents of all tensors, as a proof does.

    Attributes:
        tensors: by path, every tensor that was found.
        unreadable: a path, and what is there that cannot be read; None if all can.
        scratch: containers that the module's code may change in a call, and that lanes share.
    """

    def __init__(self, *, thorough: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.unreadable: tuple[str, str] | None = None
        self._thorough = thorough
        self._alive: dict[int, Any] = {}  # what was visited; kept alive, so that nothing else gets its id
        self._kept: list[_Kept] = []
        self._quick: list[Any] = []
        self._counted: list[Any] = []
        self._reads: list[_Read] = []
        self._hooks: list[Any] = []
        self._stores = _NOTHING
        self._ours = False
        self.scratch: list[Any] = []

    @classmethod
    def of_module(cls, model: nn.Module, *, thorough: bool = False) -> State:
        """The state of a module and everything that it holds."""
        state = cls(thorough=thorough)
        state._visit("", model)
        return state._taken(module=True)

    @classmethod
    def of_call(
        cls,
        named: Iterable[tuple[str, Any]],
        lanes: Iterable[tuple[tuple[Any, ...], Mapping[str, Any]]] = (),
        *,
        thorough: bool = False,
    ) -> State:
        """The state of a call's arguments, by name; and of the containers that were made anew for `lanes`. Caches are
        left out: lanes have their own."""
        state = cls(thorough=thorough)
        for name, value in named:
            if type(value) is Tensor:
                state.tensors[name] = value
            elif not isinstance(value, PLAIN):
                state._visit(name, value)
        own = len(state.tensors)
        for lane, (args, kwargs) in enumerate(lanes):
            for place, value in (*enumerate(args), *kwargs.items()):
                if type(value) is not Tensor and not isinstance(value, PLAIN):
                    state._visit(f"lane {lane}'s {place}", value)
        state.tensors = dict(itertools.islice(state.tensors.items(), own))
        return state._taken(module=False)

    # ------------------------------------------------------------------------------------------------------ the walk

    def _visit(self, path: str, value: Any) -> None:
        if isinstance(value, PLAIN) or id(value) in self._alive or isinstance(value, _OPAQUE):
            return
        self._alive[id(value)] = value
        prefix = f"{path}." if path else ""
        if isinstance(value, Tensor):
            self.tensors[path] = value
            if value.is_leaf and value.grad is not None:
                self._visit(f"{prefix}grad", value.grad)
        elif isinstance(value, nn.Module):
            self._visit_module(prefix, value)
        elif isinstance(value, MethodType):
            self._visit(prefix + "__self__", value.__self__)
        elif isinstance(value, functools.partial):
            self._visit(path, (value.func, value.args, value.keywords))
        elif isinstance(value, threading.local):
            self.unreadable = path, "a threading.local, which is another one in every lane"
        elif isinstance(value, FUNCTIONS) or splitter_for(value) is not None:
            return
        elif (read := _reading_of(path, value, thorough=self._thorough)) is not None:
            self._reads.append(read)
        elif isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            self.unreadable = path, f"a {type(value).__name__}, whose place cannot be read"
        else:
            self._visit_items(prefix, value)

    def _visit_items(self, prefix: str, value: Any) -> None:
        """Visit a container or an object. Of objects of ours, and of what they hold, only tensors count."""
        where = _where_from(_class_of(value))
        if where == "machinery":
            return
        ours, self._ours = self._ours, self._ours or where == "ours"
        if isinstance(value, dict | list | deque | set):
            self._keep(prefix, value, table=True)
        if isinstance(value, Mapping):
            for key, child in list(value.items()):
                self._visit(f"{prefix}{key}", child)
        elif isinstance(value, list | tuple | deque | set | frozenset):
            for index, child in enumerate(list(value)):
                self._visit(f"{prefix}{index}", child)
        slots = _slots_of(_class_of(value))
        if slots:
            self._keep(prefix, value)
        for name in slots:
            if hasattr(value, name):
                self._visit(f"{prefix}{name}", getattr(value, name))
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict) and not isinstance(value, type):
            self._keep(prefix, own)
            for name, child in list(own.items()):
                self._visit(f"{prefix}{name}", child)
        self._ours = ours

    def _visit_module(self, prefix: str, module: nn.Module) -> None:
        own = vars(module)
        where = _where_from(_class_of(module))
        ours, self._ours = self._ours, where == "ours"
        stores, self._stores = self._stores, stores_of(module) if where == "user" else _NOTHING
        if self._stores.local is not None:
            self.unreadable = f"{prefix}forward", f"reading {self._stores.local!r}, a threading.local"
        for name in _TABLES:
            self._keep(prefix, own[name], table=True)
            for key, child in own[name].items():
                self._visit(f"{prefix}{key}", child)
        self._hooks += [table for name, table in own.items() if name.endswith("_hooks") and isinstance(table, dict)]
        self._keep(prefix, own, counted=_is_plain_layer(_class_of(module), frozenset(own)))
        for kind in type(module).__mro__ if where == "user" else ():
            if _where_from(kind) == "user" and id(kind) not in self._alive:
                self._alive[id(kind)] = kind
                self._keep(prefix, kind, quick=gc.get_referents(kind.__dict__)[0])
        for name, child in list(own.items()):
            if name not in _OF_TORCH:
                self._visit(f"{prefix}{name}", child)
        self._stores, self._ours = stores, ours

    def _keep(self, prefix: str, holder: Any, *, table: bool = False, counted: bool = False, quick: Any = None) -> None:
        """Take a shallow copy of a container, and say how it is compared in every call.

        Args:
            table: it holds items, no attributes.
            counted: only their number is compared.
            quick: what the garbage collector knows it by.
        """
        if self._ours:
            return
        self._kept.append(_Kept(prefix, holder, _copy(holder)))
        quick = holder if quick is None else quick
        counted = counted or (isinstance(holder, dict | list | deque | set) and len(holder) > _MANY)
        (self._counted if counted else self._quick).append(quick)
        if self._stores.items if table else self._stores.names:
            self.scratch.append(quick)

    # ------------------------------------------------------------------------------------------------- the comparison

    def _taken(self, *, module: bool) -> State:
        """Complete the snapshot when all was visited."""
        self._items = gc.get_referents(*self._quick)
        self._lengths = [*map(len, self._counted)]
        self._scratch_items = gc.get_referents(*self.scratch)
        self._readings = [read.get() for read in self._reads]
        readable = [(path, tensor) for path, tensor in self.tensors.items() if not is_lazy(tensor)]
        self._small = [(path, tensor) for path, tensor in readable if _is_small(tensor)]
        self._versioned = [(path, tensor) for path, tensor in readable if not tensor.is_inference()]
        self._counting = [tensor for _, tensor in self._versioned]
        self._compared = self._to_compare(buffers=module)
        self._sums = [_block_sums(tensor) for _, tensor in readable] if self._thorough else []
        self._grads = [tensor.grad if tensor.is_leaf else None for _, tensor in readable] if self._thorough else []
        self._readable = readable
        self._versions: list[int] | None = None
        self._contents: list[bytes] = []
        self._copies: dict[str, bytes] = {}
        self.mark()
        return self

    def _to_compare(self, *, buffers: bool) -> list[Tensor]:
        """Small tensors without a version counter, and small buffers, up to a limit in all."""
        found: list[Tensor] = []
        room = _SMALL_BYTES
        for _, tensor in self._small:
            if tensor.is_inference() or (buffers and not isinstance(tensor, nn.Parameter)):
                room -= tensor.nbytes
                if room < 0 or len(found) == _MOST_COMPARED:
                    break
                found.append(tensor)
        return found

    def mark(self) -> None:
        """Begin to look for writes to tensors from now on; copies of small tensors are renewed."""
        versions, contents = [*map(_version, self._counting)], [*map(_bytes_of, self._compared)]
        if versions != self._versions or contents != self._contents:
            self._versions, self._contents = versions, contents
            self._copies = {path: _bytes_of(tensor) for path, tensor in self._small}

    def requires_grad(self) -> bool:
        """Whether any tensor requires gradients."""
        return any(map(_requires_grad, self.tensors.values()))

    def moved(self) -> bool:
        """Whether attributes or items may have changed since the snapshot. Cheap; `changes` knows which."""
        try:
            return not (
                gc.get_referents(*self._quick) == self._items
                and [*map(len, self._counted)] == self._lengths
                and (not self._reads or [read.get() for read in self._reads] == self._readings)
            )
        except (RuntimeError, ValueError, TypeError):  # two tensors or arrays were compared: another one is there
            return True

    def scratch_moved(self) -> bool:
        """Whether something in `scratch` may have changed since the snapshot. Cheap."""
        try:
            return gc.get_referents(*self.scratch) != self._scratch_items
        except (RuntimeError, ValueError, TypeError):
            return True

    def hooks(self) -> list[Any]:
        """All hooks of the modules."""
        return gc.get_referents(*self._hooks)

    def written(self) -> bool:
        """Whether a tensor may have been written to since `mark`. Cheap."""
        return [*map(_version, self._counting)] != self._versions or [*map(_bytes_of, self._compared)] != self._contents

    def changes(self) -> list[str]:
        """Paths of what has changed since the snapshot, and of tensors that were written to since `mark`."""
        if not self._thorough and not self.moved() and not self.written():
            return []
        return [*self.changed_items(), *self.written_tensors()]

    def changed_items(self) -> list[str]:
        """Paths of attributes and items that have changed since the snapshot."""
        return [*self._changed_items()]

    def written_tensors(self) -> list[str]:
        """Paths of tensors that were written to since `mark`."""
        return [*self._written_tensors()]

    def _changed_items(self) -> Iterator[str]:
        for kept in self._kept:
            now = _copy(kept.holder)
            if isinstance(now, dict):
                keys = kept.copy.keys() | now.keys() if list(kept.copy) != list(now) else now.keys()
                changed = [key for key in keys if not _same(now.get(key, now), kept.copy.get(key, now))]
                yield from (f"{kept.path}{key}" for key in changed)
                if not changed and list(kept.copy) != list(now):
                    yield f"{kept.path}order"
            elif not _same(now, kept.copy):
                yield kept.path.rstrip(".")
        for read, was in zip(self._reads, self._readings, strict=True):
            if not _equal(read.get(), was):
                yield read.path

    def _written_tensors(self) -> Iterator[str]:
        for (path, tensor), version in zip(self._versioned, self._versions or (), strict=True):
            if tensor._version != version:
                yield path
        compared = {id(tensor): content for tensor, content in zip(self._compared, self._contents, strict=True)}
        for path, tensor in self._small:
            if id(tensor) in compared and _bytes_of(tensor) != compared[id(tensor)]:
                yield path
        for (path, tensor), sums, grad in zip(self._readable, self._sums, self._grads, strict=False):
            if not _equal(_block_sums(tensor), sums):
                yield path
            elif tensor.is_leaf and tensor.grad is not grad:
                yield f"{path}.grad"

    # --------------------------------------------------------------------------------------------------- the way back

    def restore(self) -> list[str]:
        """Put back everything of which there is a copy. Returns the paths of what has changed and has none."""
        lost = []
        for path in dict.fromkeys(self.written_tensors()):
            copy = self._copies.get(path)
            if copy is None:
                lost.append(path)
            else:
                ctypes.memmove(self.tensors[path].data_ptr(), copy, len(copy))
        for kept in self._kept:
            _put_back(kept.holder, kept.copy)
        for read, was in zip(self._reads, self._readings, strict=True):
            if read.put is not None:
                read.put(was)
            elif not _equal(read.get(), was):
                lost.append(read.path)
        return lost


# ---------------------------------------------------------------------------------------------------- kinds of objects


def _class_of(value: object) -> Any:
    return type(value)


@functools.lru_cache(4096)
def _where_from(kind: Any) -> str:
    """Whose class this is: "ours", torch's "machinery", "library" (torch, transformers, built in), or a "user"'s."""
    name = kind.__module__
    package = name.partition(".")[0]
    if package in ("ubatch", "moe", "attention", "model_runner"):
        file = getattr(sys.modules.get(name), "__file__", None)
        return "ours" if file is not None and Path(__file__).parents[2] in Path(file).parents else "user"
    if name.startswith(_MACHINERY):
        return "machinery"
    return "library" if package in ("torch", "transformers", "builtins", "collections", "abc", "typing") else "user"


@functools.lru_cache(4096)
def _slots_of(kind: Any) -> tuple[str, ...]:
    names: list[str] = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__"))


@functools.lru_cache(1024)
def _is_plain_layer(kind: Any, names: frozenset[str]) -> bool:
    """Whether this is a layer of torch's own with nothing but its own settings, as most layers of a model are."""
    known = {"training", *getattr(kind, "__constants__", ())}.union(
        *(vars(each).get("__annotations__", ()) for each in kind.__mro__)
    )
    return kind.__module__.startswith("torch.nn.modules.") and names - _OF_TORCH <= known


def _reading_of(path: str, value: Any, *, thorough: bool) -> _Read | None:
    """How to compare a value by its contents that has no items or attributes; None if it is no such value."""
    if isinstance(value, torch.Generator):
        return _Read(path, lambda: value.get_state().tolist(), lambda was: value.set_state(torch.ByteTensor(was)))
    if isinstance(value, random.Random):
        return _Read(path, value.getstate, value.setstate)
    if type(value).__module__.startswith("numpy.random"):
        return _Read(path, lambda: pickle.dumps(value), None)
    if isinstance(value, itertools.count):
        return _Read(path, lambda: repr(value), None)
    if isinstance(value, Iterator) and type(value).__module__ == "builtins" and hasattr(value, "__setstate__"):
        return _Read(path, value.__reduce__, None)
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
    if view.nbytes > _SMALL_BYTES and not thorough:
        return _Read(path, lambda: memoryview(value).nbytes, None)
    return _Read(path, lambda: memoryview(value).tobytes(), functools.partial(_write_bytes, value))


def _write_bytes(value: Any, was: bytes) -> None:
    if isinstance(value, bytearray):
        value[:] = was
    elif memoryview(value).tobytes() != was:
        memoryview(value).cast("B")[:] = was


def _copy(holder: Any) -> Any:
    """A shallow copy of a container's items: a dict of attributes or keys, or a list or set."""
    if isinstance(holder, type):
        return dict(vars(holder))
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, list | deque):
        return list(holder)
    if isinstance(holder, set):
        return set(holder)
    return {name: getattr(holder, name) for name in _slots_of(_class_of(holder)) if hasattr(holder, name)}


def _put_back(holder: Any, copy: Any) -> None:
    """Give a container the items of `_copy` again."""
    now = _copy(holder)
    if len(now) == len(copy) and all(map(is_, _flat(now), _flat(copy))):
        return
    if isinstance(holder, dict | set):
        holder.clear()
        holder.update(copy)
    elif isinstance(holder, list | deque):
        holder.clear()
        holder.extend(copy)
    else:
        for name in now.keys() - copy.keys():
            delattr(holder, name)
        for name, value in copy.items():
            if now.get(name, copy) is not value:
                setattr(holder, name, value)


def _flat(items: Any) -> Iterable[Any]:
    return itertools.chain.from_iterable(items.items()) if isinstance(items, dict) else items


def _same(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether an item is the same object as before, or a new one that says the same."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):  # FSDP gathers a sharded weight and lets it go again
        return hasattr(one, "to_local") or hasattr(other, "to_local")
    if type(one) is not type(other) or depth > _DEEP:
        return False
    if isinstance(one, PLAIN):
        return bool(one == other or (one != one and other != other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key], depth + 1) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_same, one, other, itertools.repeat(depth + 1)))
    if isinstance(one, set | frozenset | MethodType | torch.Size):
        return bool(one == other)
    own = getattr(one, "__dict__", None)
    return bool(own) and not isinstance(one, nn.Module) and _same(own, other.__dict__, depth + 1)


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else bool(one == other)


def _is_small(tensor: Tensor) -> bool:
    """Whether a copy of a tensor is kept: of its bytes, where they are in one piece."""
    return (
        tensor.nbytes <= _SMALL_BYTES
        and tensor.device.type == "cpu"
        and _is_readable(tensor)
        and tensor.is_contiguous()
    )


def _bytes_of(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _is_readable(tensor: Tensor) -> bool:
    """Whether the bytes of a tensor can be read: not of a subclass, of meta or lazy tensors, or of a shard that is not
    gathered."""
    if is_lazy(tensor) or type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_meta or tensor.is_quantized) and tensor.untyped_storage().nbytes() > 0


@torch.no_grad()
def _block_sums(tensor: Tensor) -> Tensor | None:
    """Sums over blocks of a tensor's bytes; None if its bytes cannot be read."""
    if not _is_readable(tensor) or not tensor.numel():
        return None
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64) if flat.storage_offset() % 8 == 0 else flat[:0].view(torch.int64)
    if not words.numel():
        return flat.sum(dtype=torch.int64).view(1)
    blocks = words.numel() // _BLOCK * _BLOCK
    sums = (
        words[:blocks].view(-1, _BLOCK).sum(1),
        words[blocks:].sum().view(1),
        flat[whole:].sum(dtype=torch.int64).view(1),
    )
    return torch.cat(sums)
