"""Containers in a call's arguments and outputs: their children, and how to rebuild them with other children.

    dict and other mappings, named tuple, tuple, list, dataclass, Hugging Face's `ModelOutput`

Everything else is a leaf.
"""

import copy
import dataclasses
import functools
import types
from collections import UserDict
from collections.abc import Hashable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, type, Enum)
"""Classes of values that are the same for every row."""
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
LEAF_CLASSES = frozenset({Tensor, Parameter, *PLAIN, *FUNCTIONS})
"""Exact classes of most leaves; a look-up in this set is faster than `isinstance`."""


def children_of(value: Any) -> list[tuple[str, Any]] | None:
    """Named children of a container, None for a leaf."""
    if type(value) in LEAF_CLASSES:
        return None
    if isinstance(value, Mapping):
        named = [(str(key), child) for key, child in value.items()]
        return named if len(dict(named)) == len(named) else None  # 0 and "0" cannot be told apart
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        return [(str(index), child) for index, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        if not all(f.init for f in fields) and not hasattr(value, "__post_init__"):
            return None  # fields outside __init__ could not be set when it is rebuilt
        return [(f.name, getattr(value, f.name)) for f in fields if f.init]
    return None


def rebuild(value: Any, children: list[Any]) -> Any:
    """A container like `value` with other children."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # ModelOutput is a dataclass *and* a mapping without its unset fields: rebuild it from the fields.
        names = list(value) if isinstance(value, Mapping) else [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(value, **dict(zip(names, children, strict=True)))
    if isinstance(value, dict | UserDict):
        clone = copy.copy(value)  # keeps its other attributes, such as a defaultdict's factory
        clone.update(zip(value, children, strict=True))
        return clone
    if isinstance(value, Mapping):  # a copy might share its items with the original
        return type(value)(dict(zip(value, children, strict=True)))  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*children)
    return type(value)(children)


def attributes_of(value: Tensor) -> dict[str, Any]:
    """A tensor's Python attributes, without those that torch's compiler sets."""
    return {name: own for name, own in value.__dict__.items() if not name.startswith("_dynamo")}


def tensor_kind(value: Tensor) -> Hashable:
    """A tensor's class, and its plain attributes as (name, class, value); None for a plain tensor without any."""
    own = value.__dict__ and attributes_of(value)
    if not own and type(value) in LEAF_CLASSES:
        return None
    plain = [(name, type(own[name]), own[name]) for name in sorted(own) if isinstance(own[name], PLAIN)]
    return type(value), tuple(plain)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a value: in containers, and in the attributes of other objects."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, PLAIN):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            yield each
            continue
        children = children_of(each)
        waiting += [child for _, child in children] if children is not None else getattr(each, "__dict__", {}).values()


def slots_of(value: object) -> tuple[str, ...]:
    """Names of the attributes that an object may have in slots, as Python mangles them."""
    kind: Any = type(value)
    return _slots_of(kind)


@functools.lru_cache(4096)
def _slots_of(kind: Any) -> tuple[str, ...]:
    names: list[str] = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{each.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
