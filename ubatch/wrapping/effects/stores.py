"""What the code of a module's `forward` does, as its bytecode tells.

A lane that leaves something on `self`, hands over and reads it again finds what another lane has left there. A value
that is back when the call ends shows in no comparison afterwards, so attributes of modules whose code sets attributes
are compared when lanes hand over, too. That would cost too much for all modules, and the code of most sets none.
"""

import dis
import functools
import inspect
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from torch import nn

_LIBRARIES = frozenset({"torch", "transformers", "numpy", "ubatch"})
"""Packages whose functions leave nothing on a user's module."""


def code_of(module: nn.Module) -> tuple[bool, str | None]:
    """Whether `forward`, or a method or function that it names, sets or deletes attributes of anything; and the name of
    a `threading.local` that they read, or None."""
    own: Any = vars(module).get("forward")
    kind: Any = type(module)
    return _of_class(kind) if own is None else _of_code(kind, own)


@functools.lru_cache(4096)
def methods_read_local(kind: Any) -> str | None:
    """The name of a `threading.local` that the methods of a user's class read, which `forward` may call, or None.
    Installed packages see to that."""
    if "site-packages" in (getattr(sys.modules.get(kind.__module__), "__file__", None) or ""):
        return None
    return next((local for each in vars(kind).values() if (local := _of_code(kind, each)[1]) is not None), None)


@functools.lru_cache(4096)
def _of_class(kind: Any) -> tuple[bool, str | None]:
    return _of_code(kind, inspect.getattr_static(kind, "forward", None))


def _of_code(kind: type, forward: Any) -> tuple[bool, str | None]:
    stores, local = False, None
    waiting, seen = [*_functions_in(forward)], set()
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen or function.__module__.partition(".")[0] in _LIBRARIES:
            continue
        seen.add(function.__code__)
        reached = list(zip(function.__code__.co_freevars, map(_contents, function.__closure__ or ()), strict=True))
        for code in _with_inner(function.__code__):
            stores = stores or any(each.opname in ("STORE_ATTR", "DELETE_ATTR") for each in dis.get_instructions(code))
            stores = stores or "setattr" in code.co_names
            reached += [(name, function.__globals__.get(name)) for name in code.co_names]
            own = [inspect.getattr_static(kind, name, None) for name in code.co_names]
            waiting += [each for value in own for each in _functions_in(value)]
        for name, value in reached:
            inside = vars(value).values() if isinstance(value, SimpleNamespace) else ()
            local = name if any(isinstance(each, threading.local) for each in (value, *inside)) else local
            waiting += _functions_in(value)
    return stores, local


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """The Python function that a method, property or decorated function is made of."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        yield value
        yield from _functions_in(getattr(value, "__wrapped__", None))


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
