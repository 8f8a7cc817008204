"""What the code of a module's `forward` may store on objects that lanes share, as its bytecode tells.

A lane that leaves something on `self`, hands over and reads it again finds what another lane has left there. A value
that is back when the call ends shows in no comparison afterwards, so `State.scratch` names what must be looked at when
lanes hand over. That would cost too much for every attribute, and the code of most modules stores none.
"""

from __future__ import annotations

import dis
import functools
import inspect
import threading
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

__all__ = ["Stores", "stores_of"]

_CHANGING = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop", "popitem", "popleft"}
    | {"remove", "reverse", "rotate", "setdefault", "sort", "update"}
)
"""Methods that change a list, dict, set or deque. Those of tensors end in `_`."""
_LIBRARIES = frozenset({"torch", "transformers", "numpy", "ubatch"})
"""Packages whose functions leave nothing on a user's module."""


class Stores(NamedTuple):
    """What code may store.

    Attributes:
        names: attributes that it sets or deletes, of whatever object.
        items: whether it may change the items of containers.
        local: name of a `threading.local` that it reads, or None.
    """

    names: frozenset[str]
    items: bool
    local: str | None


def stores_of(module: nn.Module) -> Stores:
    """What `forward` and the methods and functions that it names may store."""
    own, kind = vars(module).get("forward"), _class_of(module)
    return _stores(kind) if own is None else _stores_in(kind, own)


def _class_of(value: object) -> Any:
    return type(value)


@functools.lru_cache(4096)
def _stores(kind: Any) -> Stores:
    return _stores_in(kind, inspect.getattr_static(kind, "forward", None))


def _stores_in(kind: type, forward: Any) -> Stores:
    names: set[str] = set()
    items, local = False, None
    waiting, seen = [*_functions_in(forward)], set()
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen or function.__module__.partition(".")[0] in _LIBRARIES:
            continue
        seen.add(function.__code__)
        for code in _with_inner(function.__code__):
            for instruction in dis.get_instructions(code):
                if instruction.opname in ("STORE_ATTR", "DELETE_ATTR"):
                    names.add(instruction.argval)
                items = items or instruction.opname in ("STORE_SUBSCR", "DELETE_SUBSCR")
            items = items or not _CHANGING.isdisjoint(code.co_names)
            for name in code.co_names:
                value = function.__globals__.get(name)
                local = name if isinstance(value, threading.local) else local
                waiting += _functions_in(value)
                waiting += _functions_in(inspect.getattr_static(kind, name, None))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            local = name if isinstance(_contents(cell), threading.local) else local
            waiting += _functions_in(_contents(cell))
    return Stores(frozenset(names), items, local)


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """The Python function that a method, property or decorated function is made of."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        yield value
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:
            yield from _functions_in(wrapped)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
