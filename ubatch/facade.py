"""Standing in for a module: everything but its call is the module's own.

Attributes, parameters, `state_dict`, `to`, `eval` act on the module itself; what is set here is set there. Its other
methods (`generate`, ...) run on a *twin*: an object of a subclass that shares the module's `__dict__` and whose
`forward` is the stand-in's, so that what they call goes through it. The module is not changed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["ModuleFacade"]

_READING = frozenset(
    {"buffers", "children", "extra_repr", "get_buffer", "get_extra_state", "get_parameter", "get_submodule", "modules"}
    | {"named_buffers", "named_children", "named_modules", "named_parameters", "parameters", "state_dict"}
    | {"_named_members", "_save_to_state_dict"}
)
"""Methods of `nn.Module` that change nothing."""


class ModuleFacade(nn.Module):
    """A stand-in for `model`. Subclasses define `forward`; their own state has names that begin with `_ubatch_`."""

    def __init__(self, model: nn.Module) -> None:
        self._keep("_ubatch_model", model)
        self._keep("_ubatch_twin_kind", _twin_kind_of(type(model)))

    def _keep(self, name: str, value: Any) -> None:
        """Set an attribute of the stand-in itself."""
        object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own call, through `forward`."""
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_ubatch_"):
            raise AttributeError(f"{type(self).__name__}.__init__ did not run: no {name}")
        return getattr(self._twin(), name)

    def _twin(self) -> nn.Module:
        """An object that *is* the module (same `__dict__`), but whose call and forward go through the stand-in.

        It refers to the stand-in, not the other way round, so that a stand-in that is dropped is gone at once.
        """
        twin: nn.Module = object.__new__(self._ubatch_twin_kind)
        object.__setattr__(twin, "__dict__", self._ubatch_model.__dict__)
        object.__setattr__(twin, "_ubatch_facade", self)
        return twin

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ubatch_model, name, value)
        self._module_changed(f"attribute {name!r} was set")

    def __delattr__(self, name: str) -> None:
        delattr(self._ubatch_model, name)
        self._module_changed(f"attribute {name!r} was deleted")

    def _module_changed(self, how: str) -> None:
        """Something was set, or a method that may change the module ran (`how` is its name). For subclasses."""

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._ubatch_model)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._ubatch_model!r})"


def _twin_kind_of(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass that goes by the same name. The slot is the twin's own, where the `__dict__` is the module's."""

    @functools.wraps(inspect.getattr_static(kind, "forward"))  # a compiled module's is no function
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._ubatch_facade.forward(*args, **kwargs)

    body = {"__call__": forward, "forward": forward, "__module__": kind.__module__, "__slots__": ("_ubatch_facade",)}
    return type(kind.__name__, (kind,), body)


def _delegate(name: str) -> Callable[..., Any]:
    """A method that the module runs; where it returns itself, the stand-in returns itself."""

    @functools.wraps(getattr(nn.Module, name))
    def method(self: ModuleFacade, *args: Any, **kwargs: Any) -> Any:
        model = self._ubatch_model
        result = getattr(model, name)(*args, **kwargs)
        if name not in _READING:
            self._module_changed(name)
        return self if result is model else result

    return method


def _delegate_module_methods() -> None:
    """`nn.Module`'s own public methods (and those that its recursion uses) act on the wrapped module."""
    own = set(ModuleFacade.__dict__) | {"forward"}
    recursion = ("_apply", "_named_members", "_load_from_state_dict", "_save_to_state_dict")
    for name, value in vars(nn.Module).items():
        if callable(value) and name not in own and (not name.startswith("_") or name in recursion):
            setattr(ModuleFacade, name, _delegate(name))


_delegate_module_methods()
