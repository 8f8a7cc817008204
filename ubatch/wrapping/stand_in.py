"""A stand-in for a module: everything except its call is the module's own.

Parameters, `state_dict`, `to`, `eval` and attributes (read or set) are those of the module itself. Its other methods
and properties (`generate`, ...) run on its *twin*: an object of a subclass that shares the module's `__dict__` and
whose `forward` is the stand-in's, so that their calls go through it. The module is not changed. References, chosen so
that a dropped stand-in is deleted at once and a kept method still works:

    stand-in ----> twin ----> core: an object with the stand-in's `__dict__`, but without a twin
                   twin - - > stand-in (weak): what a method returns that returns its `self`
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.fx import _symbolic_trace as fx

from ubatch.errors import ConfigError

__all__ = ["StandIn", "refuse_tracing", "uncompiled"]

_READING = frozenset(
    {"buffers", "children", "extra_repr", "get_buffer", "get_extra_state", "get_parameter", "get_submodule", "modules"}
    | {"named_buffers", "named_children", "named_modules", "named_parameters", "parameters", "state_dict"}
    | {"_named_members", "_save_to_state_dict"}
)
"""Methods of `nn.Module` that do not change the module."""
_NOTHING: Any = object()
_NEVER_RETURN_SELF = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
_TRACED = (
    "{0} cannot see into a UBatchWrapper, whose lanes are threads of their own. Give it the module itself "
    "(wrapper.module), and wrap what it returns if that shall overlap."
)


class StandIn(nn.Module):
    """A stand-in for `model`. Subclasses define `forward`; what is theirs alone has names that begin with `_ubatch_`,
    since any other name may be the module's."""

    __slots__ = ("_ubatch_twin",)

    def __init__(self, model: nn.Module) -> None:
        self._ubatch_keep("_ubatch_model", model)
        self._ubatch_keep("_ubatch_twin_kind", _twin_kind_of(type(model)))
        self._ubatch_keep("_ubatch_methods", {})

    def _ubatch_keep(self, name: str, value: Any) -> None:
        """Set an attribute of the stand-in itself."""
        object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module through `forward`."""
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_ubatch_"):
            raise AttributeError(f"{type(self).__name__}.__init__ did not run: no {name}")
        model = self._ubatch_model
        if not _runs_code(model, name):
            value = getattr(model, name)
            bound = isinstance(value, MethodType) and value.__self__ is model
            return MethodType(value.__func__, self._ubatch_as_twin()) if bound else value
        twin = self._ubatch_as_twin()
        value = getattr(twin, name)
        if value is twin:
            return self
        if isinstance(value, MethodType) and value.__self__ is twin:
            return MethodType(self._ubatch_method(name, value.__func__), twin)
        return value

    def _ubatch_method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The wrapped method. Cached, so that two accesses give the same object."""
        if any(check(method) for check in _NEVER_RETURN_SELF):
            return method
        made: dict[str, Any] = self._ubatch_methods
        if name not in made or made[name].__wrapped__ is not method:
            made[name] = _returning_the_stand_in(method)
        found: Callable[..., Any] = made[name]
        return found

    def _ubatch_as_twin(self) -> Any:
        """The object that *is* the module (same `__dict__`), but whose call and forward go through the stand-in."""
        model = self._ubatch_model
        try:
            twin = object.__getattribute__(self, "_ubatch_twin")
        except AttributeError:
            twin = None
        if twin is None or twin.__dict__ is not model.__dict__:
            core = object.__new__(type(self))
            object.__setattr__(core, "__dict__", self.__dict__)
            twin = object.__new__(self._ubatch_twin_kind)
            object.__setattr__(twin, "__dict__", model.__dict__)
            object.__setattr__(twin, "_ubatch_core", core)
            object.__setattr__(twin, "_ubatch_stand_in", weakref.ref(self))
            self._ubatch_keep("_ubatch_twin", twin)
        return twin

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ubatch_model, name, value)
        self._ubatch_module_changed(f"attribute {name!r} was set")

    def __delattr__(self, name: str) -> None:
        delattr(self._ubatch_model, name)
        self._ubatch_module_changed(f"attribute {name!r} was deleted")

    def _ubatch_module_changed(self, how: str) -> None:
        """Called when an attribute was set or a method ran that may change the module; `how` tells which. For
        subclasses."""

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse `torch.jit.script`, which calls this first, also on a module's children."""
        raise ConfigError(_TRACED.format("torch.jit.script"))

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._ubatch_model)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._ubatch_model!r})"


def refuse_tracing() -> None:
    """Refuse tracers, which record one thread's operations: they would record the lanes' results as constants.

    Raises:
        ConfigError: `torch.jit.trace`, `torch.export` or `torch.fx` is at work.
    """
    if torch._C._get_tracing_state() is not None:
        raise ConfigError(_TRACED.format("torch.jit.trace"))
    if torch.compiler.is_exporting():
        raise ConfigError(_TRACED.format("torch.export"))
    if fx._is_fx_tracing_flag:
        raise ConfigError(_TRACED.format("torch.fx"))


def uncompiled(work: Callable[..., Any], *args: Any) -> Any:
    """Run `work(*args)` without `torch.compile`, which cannot compile its locks and threads."""
    global _disabled
    if _disabled is None:
        _disabled = torch.compiler.disable(_call)  # not at import, for it imports the compiler
    return _disabled(work, *args)


def _call(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


_disabled: Callable[..., Any] | None = None


def _runs_code(model: nn.Module, name: str) -> bool:
    """Whether the attribute `name` is a method or runs code of the module's class; both need the twin."""
    kind = type(model)
    if kind.__getattribute__ is not object.__getattribute__:
        return True
    found = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), _NOTHING)
    if found is _NOTHING:  # parameters, buffers and submodules; and nothing, which is an error of the module's
        return kind.__getattr__ is not nn.Module.__getattr__ and name not in vars(model)
    if isinstance(found, staticmethod | classmethod) or not hasattr(type(found), "__get__"):
        return False
    return hasattr(type(found), "__set__") or name not in vars(model)


def _twin_kind_of(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass that acts as `kind`. A twin has its own slots, but shares the module's `__dict__`."""

    @functools.wraps(inspect.getattr_static(kind, "forward"))  # a compiled module's is no function
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._ubatch_core.forward(*args, **kwargs)

    def new(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        return kind(*args, **kwargs)  # a method that makes another one, as type(self)(...)

    body: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__slots__": ("_ubatch_core", "_ubatch_stand_in"),
        "__class__": property(lambda self: kind),
        "__new__": new,
        "__call__": forward,
        "forward": forward,
        "__copy__": lambda self: copy.copy(_itself(self)),
        "__deepcopy__": lambda self, memo: copy.deepcopy(_stand_in_of(self), memo),
        "__reduce_ex__": lambda self, protocol: (_unchanged, (_stand_in_of(self),)),
    }
    if hasattr(kind, "__del__"):
        body["__del__"] = lambda self: None  # the module is still alive, and has its own `__del__`
    if kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__:
        body["__eq__"] = lambda self, other: _itself(self) is _itself(other)
        body["__hash__"] = lambda self: hash(_itself(self))
    return _passing_for(kind)(kind.__name__, (kind,), body)


def _passing_for(kind: type[nn.Module]) -> type[type]:
    """A metaclass whose classes equal `kind`, for methods that compare their `type(self)` or look it up."""
    body = {"__eq__": lambda cls, other: other is cls or other is kind, "__hash__": lambda cls: hash(kind)}
    return type(type(kind).__name__, (type(kind),), body)


def _returning_the_stand_in(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of a twin: if it returns the twin, the stand-in is returned instead."""

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        self = self._ubatch_as_twin() if isinstance(self, StandIn) else self
        result = method(self, *args, **kwargs)
        return _stand_in_of(self) if result is self else result

    return called


def _stand_in_of(twin: Any) -> Any:
    """The stand-in of a twin; its core if only a method was kept."""
    stand_in = twin._ubatch_stand_in()
    return twin._ubatch_core if stand_in is None else stand_in


def _unchanged(stand_in: StandIn) -> StandIn:
    return stand_in


def _itself(module: object) -> object:
    """The module of a twin; `module` itself if it is no twin."""
    core = getattr(type(module), "_ubatch_core", None)
    return module if core is None else core.__get__(module)._ubatch_model


def _delegate(name: str) -> Callable[..., Any]:
    """A method that runs on the module; if it returns the module, the stand-in is returned instead."""

    @functools.wraps(getattr(nn.Module, name))
    def method(self: StandIn, *args: Any, **kwargs: Any) -> Any:
        model = self._ubatch_model
        result = getattr(model, name)(*args, **kwargs)
        if name not in _READING:
            self._ubatch_module_changed(name)
        return self if result is model else result

    return method


def _delegate_module_methods() -> None:
    """`nn.Module`'s own public methods (and those that its recursion uses) act on the wrapped module."""
    own = set(StandIn.__dict__) | {"forward"}
    recursion = ("_apply", "_named_members", "_load_from_state_dict", "_save_to_state_dict")
    for name, value in vars(nn.Module).items():
        if callable(value) and name not in own and (not name.startswith("_") or name in recursion):
            setattr(StandIn, name, _delegate(name))


_delegate_module_methods()
