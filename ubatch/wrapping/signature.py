"""Signatures: two calls of a module with the same signature share a proof.

A signature has names, structure, classes, dtypes, numbers of dimensions, values, the split dimensions, mode, training,
gradients and autocast. It has no sizes, with one exception: lanes of a single row have their own signature, because a
module that squeezes treats them differently.

    bool, string, enum, function, 0, 1, -1, an infinity, NaN      by value
    any other number, also in a 0-dim tensor on a CPU             by value, until four were proved (`proof_table`)
    list of numbers with one entry per row                        by type
    tensor                                                        by class, attributes, dtype, dimensions
    other object                                                  by class, and its attributes by these rules; without
                                                                  any, such as a set or slice, by value
"""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Hashable
from enum import Enum
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ubatch.calls.caches import splitter_for
from ubatch.calls.call_plan import CallPlan
from ubatch.calls.containers import FUNCTIONS, PLAIN, children_of, tensor_kind, tensors_in
from ubatch.schedules.forward_context import ForwardMode

__all__ = ["Signature", "is_flag", "signature_of"]

_SPECIAL = frozenset({0, 1, -1, math.inf, -math.inf})
_DEEP = 3
"""How deep attributes of objects are looked at."""


class Signature(NamedTuple):
    """A call's signature.

    Attributes:
        base: everything but `numbers`.
        numbers: values of ordinary numbers, in order.
    """

    base: Hashable
    numbers: tuple[complex, ...]


def signature_of(plan: CallPlan, mode: ForwardMode, lanes: int, *, training: bool, trains: bool) -> Signature:
    """The signature of a call.

    Args:
        mode: what the step does.
        training: whether the module is in training mode.
        trains: whether gradients are recorded, and some tensor of the module requires them.
    """
    numbers: list[complex] = []
    base = (
        mode,
        training,
        trains,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.cuda.is_available() and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        plan.rows // lanes == 1,
        tuple([(leaf.path, leaf.dim) for leaf in plan.leaves]),
        *[(name, _kind(name, value, plan, numbers)) for name, value in plan.args],
        *[(name, _kind(name, value, plan, numbers)) for name, value in sorted(plan.kwargs.items())],
    )
    return Signature(base, tuple(numbers))


def is_flag(value: object) -> bool:
    """Whether another value makes another call of it."""
    if isinstance(value, int | float | complex) and not isinstance(value, bool):
        return value != value or value in _SPECIAL
    return isinstance(value, PLAIN)


def _kind(path: str, value: Any, plan: CallPlan, numbers: list[complex], deep: int = 0) -> object:
    if isinstance(value, Tensor):
        if value.dim() == 0 and value.device.type == "cpu":
            return tensor_kind(value), value.dtype, value.requires_grad, _number(value.item(), numbers)
        return tensor_kind(value), value.dtype, value.dim(), value.requires_grad
    if isinstance(value, int | float | complex) and not isinstance(value, bool | Enum):
        return _number(value, numbers)
    if isinstance(value, MethodType):
        return value.__func__, _kind(path, value.__self__, plan, numbers, deep)
    if isinstance(value, functools.partial):
        return value.func, _kind(path, (value.args, value.keywords), plan, numbers, deep)
    if isinstance(value, (*PLAIN, *FUNCTIONS)):
        return type(value), value  # another function is another call
    children = children_of(value)
    if children is None:
        own = getattr(value, "__dict__", None)
        if splitter_for(value) is not None:
            return type(value)
        if own and deep < _DEEP and not isinstance(value, nn.Module) and not hasattr(value, "__slots__"):
            return type(value), *[(key, _kind("", child, plan, numbers, deep + 1)) for key, child in own.items()]
        return type(value), _value_of(value)
    if len(children) > 1 and isinstance(value, list | tuple):
        if any(leaf.path == path and leaf.dim is not None for leaf in plan.leaves):
            return type(value), frozenset(type(child) for _, child in children)
        if all(isinstance(child, Tensor) for _, child in children):  # as many as there may be
            kinds = {_kind("", child, plan, []) for _, child in children}
            return type(value), kinds.pop() if len(kinds) == 1 else frozenset(kinds)
    return type(value), *[(key, _kind(f"{path}.{key}", child, plan, numbers, deep)) for key, child in children]


def _value_of(value: Any) -> object:
    """What tells a value of any other class from another one: its pickled form, or itself where that cannot be had."""
    if isinstance(value, nn.Module) or any(True for _ in tensors_in(value)):
        return id(value)
    try:
        return pickle.dumps(value)
    except Exception:
        return id(value)


def _number(value: complex, numbers: list[complex]) -> object:
    if is_flag(value):
        return type(value), "nan" if value != value else value
    numbers.append(value)
    return type(value)
