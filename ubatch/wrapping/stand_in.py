"""A stand-in for a module: everything except its call is the module's own.

Parameters, `state_dict`, `to`, `eval` and attributes (read or set) are those of the module itself. Its other methods
and properties (`generate`, `len`, `+`, ...) run on its *twin*: an object of a subclass that shares the module's
`__dict__` and whose `forward` is the stand-in's, so that their calls go through it. Python looks special methods up on
the type, so a stand-in for a module that has some is of a subclass that has them too. The module is not changed.
References, chosen so that a dropped stand-in is deleted at once and a kept method still works:

    stand-in ----> twin ----> core: an object with the stand-in's `__dict__`, but without a twin
                   twin - - > stand-in (weak): what a method returns that returns its `self`
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext
from torch.fx import _symbolic_trace as fx

from ubatch.errors import ConfigError

_READING = frozenset(
    {"buffers", "children", "extra_repr", "get_buffer", "get_extra_state", "get_parameter", "get_submodule", "modules"}
    | {"named_buffers", "named_children", "named_modules", "named_parameters", "parameters", "state_dict"}
    | {"_named_members", "_save_to_state_dict", "__iter__", "__reversed__", "__aiter__"}
)
"""Methods that do not change the module, nor do the generators that they return."""
_NOT_DELEGATED = frozenset(
    {"__class_getitem__", "__copy__", "__deepcopy__", "__del__", "__getattribute__", "__getstate__", "__new__"}
    | {"__init_subclass__", "__reduce_ex__", "__subclasshook__"}
)
"""Special methods by which Python makes, copies and deletes the stand-in itself, besides those that it defines."""
_DEFERS = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
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
        self._ubatch_keep("_ubatch_methods", {})
        vars(object)["__class__"].__set__(self, _with_special_methods(type(self), type(model)))

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
        owner = self._ubatch_as_twin() if _runs_code(model, name) else model
        value = getattr(owner, name)
        if value is owner:
            return self
        if isinstance(value, MethodType) and value.__self__ is owner:
            method = self._ubatch_methods.get(name)  # kept, so that two accesses give equal methods
            if method is None or method.__wrapped__ is not value.__func__:
                method = self._ubatch_methods[name] = _on_the_twin(name, value.__func__)
            return MethodType(method, self._ubatch_as_twin())
        return value

    def _ubatch_as_twin(self) -> Any:
        """The object that *is* the module (same `__dict__`), but whose call and forward go through the stand-in."""
        if torch.compiler.is_dynamo_compiling():
            return uncompiled(self._ubatch_as_twin)
        model = self._ubatch_model
        twin = getattr(self, "_ubatch_twin", None)
        if twin is None or twin.__dict__ is not model.__dict__ or type(twin).__base__ is not type(model):
            core = object.__new__(type(self))
            object.__setattr__(core, "__dict__", self.__dict__)
            twin = object.__new__(_twin_kind_of(type(model)))
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
        """Called when an attribute was set, a method of `nn.Module` ran that may change the module, or a method of the
        module's class returned a generator or coroutine, whose code runs later; `how` tells which. For subclasses."""

    def _ubatch_watching(self, how: str) -> AbstractContextManager[None]:
        """Entered while the method `how` of the module's class runs on the twin; it may change the module. The methods
        that this method calls do not enter it again. For subclasses."""
        return nullcontext()

    __class__ = property(lambda self: _unless_compiling(self, self._ubatch_model.__class__))
    """The module's class, for `isinstance`; `type` gives the stand-in's."""

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse `torch.jit.script`, which calls this first, also on a module's children."""
        raise ConfigError(_TRACED.format("torch.jit.script"))

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self._ubatch_model)})

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
        _disabled = torch.compiler.disable(operator.call)  # not at import, for it imports the compiler
    return _disabled(work, *args)


_disabled: Callable[..., Any] | None = None


def _unless_compiling(self: object, kind: type) -> type:
    """`kind`, but the real type for torch.compile: it looks methods up on `self.__class__`, unlike Python."""
    return kind if TracingContext.try_get() is None else type(self)


def _runs_code(model: nn.Module, name: str) -> bool:
    """Whether the attribute `name` is a method or runs code of the module's class; both need the twin."""
    kind = type(model)
    if kind.__getattribute__ is not object.__getattribute__:
        return True
    found = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
    if found is None:  # parameters, buffers and submodules; and nothing, which is an error of the module's
        return kind.__getattr__ is not nn.Module.__getattr__ and name not in vars(model)
    binds = hasattr(type(found), "__get__") and not isinstance(found, staticmethod | classmethod)
    return binds and (hasattr(type(found), "__set__") or name not in vars(model))


def _twin_kind_of(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass that acts as `kind`. A twin has its own slots, but shares the module's `__dict__`."""

    @functools.wraps(inspect.getattr_static(kind, "forward"))  # a compiled module's is no function
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._ubatch_core.forward(*args, **kwargs)

    body: dict[str, Any] = {
        **_named_as(kind),
        "__slots__": ("_ubatch_core", "_ubatch_stand_in"),
        "__class__": property(lambda self: _unless_compiling(self, kind)),
        "__new__": lambda cls, *args, **kwargs: kind(*args, **kwargs),  # for a method that calls type(self)(...)
        "__call__": forward,
        "forward": forward,
        "__copy__": lambda self: copy.copy(_itself(self)),
        "__deepcopy__": lambda self, memo: copy.deepcopy(_stand_in_of(self), memo),
        "__reduce_ex__": lambda self, protocol: (_stand_in_of, (_stand_in_of(self),)),
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
    body["__instancecheck__"] = lambda cls, instance: isinstance(instance, kind)
    return type(type(kind).__name__, (type(kind),), body)


def _named_as(kind: type) -> dict[str, Any]:
    """What a subclass has in its body that shall look like `kind`."""
    return {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}


def _with_special_methods(kind: Any, model_kind: type[nn.Module]) -> Any:
    """The subclass of `kind` that has the special methods of the module's class; `kind` itself if there are none."""
    kind = vars(kind).get("_ubatch_kind", kind)
    own = _NOT_DELEGATED.union(*(vars(each) for each in kind.__mro__ if each is not object))
    special: set[tuple[str, bool]] = set()
    for name in {name for each in model_kind.__mro__ if each not in nn.Module.__mro__ for name in vars(each)} - own:
        value = getattr(model_kind, name)
        if name[:2] == name[-2:] == "__" and (value is None or (callable(value) and not isinstance(value, type))):
            special.add((name, value is not None))
    return _subclass(kind, frozenset(special)) if special else kind


@functools.cache
def _subclass(kind: Any, special: frozenset[tuple[str, bool]]) -> Any:
    """A subclass of `kind` with these special methods: name, and whether it is a method or None (as `__hash__`)."""
    body: dict[str, Any] = {name: _on_the_twin(name, _special_method(name)) if runs else None for name, runs in special}
    body |= {**_named_as(kind), "_ubatch_kind": kind, "__reduce__": lambda self: (kind, *kind.__reduce__(self)[1:])}
    return type(kind)(kind.__name__, (kind,), body)


def _special_method(name: str) -> Callable[..., Any]:
    """The special method `name` of whatever class a twin has, found as Python finds it: not on the instance."""

    def special(twin: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(type(twin), twin), name)(*args, **kwargs)

    special.__name__ = name
    return special


def _on_the_twin(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of a twin: it is watched, and if it returns the twin, the stand-in is returned instead."""

    @functools.wraps(method)
    def called(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return uncompiled(functools.partial(called, self, *args, **kwargs))
        stand_in = _stand_in_of(self)
        twin = stand_in._ubatch_as_twin()
        with stand_in._ubatch_watching(name):
            result = method(twin, *args, **kwargs)
        if name not in _READING and isinstance(result, Generator | Coroutine | AsyncGenerator):
            stand_in._ubatch_module_changed(name)
        return _awaited(twin, result) if isinstance(result, Coroutine) else _returned(twin, result)

    defers = any(check(method) for check in _DEFERS)
    return functools.update_wrapper(_Deferring(method, called), method) if defers else called


class _Deferring(functools.partial[Any]):
    """Calls its argument; `inspect` takes it for the generator or coroutine function `func`, as it does any partial."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.args[0](*args, **kwargs)


async def _awaited(twin: Any, coroutine: Any) -> Any:
    return _returned(twin, await coroutine)


def _returned(twin: Any, result: Any) -> Any:
    """What the caller gets for the `result` of a twin's method."""
    return _stand_in_of(twin) if result is twin or result is twin._ubatch_core._ubatch_model else result


def _stand_in_of(twin: Any) -> Any:
    """The stand-in of a twin (its core if only a method was kept), or of itself."""
    stand_in = twin if isinstance(twin, StandIn) else twin._ubatch_stand_in()
    return twin._ubatch_core if stand_in is None else stand_in


def _itself(module: Any) -> Any:
    """The module of a twin; `module` itself if it is no twin."""
    return module._ubatch_core._ubatch_model if hasattr(type(module), "_ubatch_core") else module


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
    public = [name for name in vars(nn.Module) if not name.startswith("_")]
    for name in (*public, "_apply", "_named_members", "_load_from_state_dict", "_save_to_state_dict"):
        if callable(getattr(nn.Module, name)) and name not in {*vars(StandIn), "forward"}:
            setattr(StandIn, name, _delegate(name))


_delegate_module_methods()
