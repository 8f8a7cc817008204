"""Signatures: two calls of a module with the same signature share a proof.

A signature has names, structure, dtypes, numbers of dimensions, types of numbers, values of bools and strings, the
split dimensions, mode, training, gradients and autocast. It has no sizes, with one exception: lanes of a single row
have their own signature, because a module that squeezes treats them differently.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ubatch.calls.call_plan import CallPlan
from ubatch.calls.containers import FUNCTIONS, children_of
from ubatch.schedules.forward_context import ForwardMode

__all__ = ["signature_of"]

_BY_VALUE = (type(None), bool, str, Enum, torch.dtype, torch.device, torch.layout)
_BY_TYPE = (int, float, complex, bytes)


def signature_of(model: nn.Module, plan: CallPlan, mode: ForwardMode, lanes: int) -> Hashable:
    """The signature of a call.

    Args:
        mode: what the step does.
    """
    return (
        mode,
        model.training,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.cuda.is_available() and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        plan.rows // lanes == 1,
        plan.dims,
        *[(name, _kind(value)) for name, value in plan.args],
        *[(name, _kind(value)) for name, value in sorted(plan.kwargs.items())],
    )


def _kind(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.dim(), value.requires_grad
    if isinstance(value, _BY_VALUE):
        return value
    kind = type(value)
    if kind in _BY_TYPE:
        return kind
    if isinstance(value, FUNCTIONS):
        return value  # another function is another call
    children = children_of(value)
    if children is None:
        return kind
    inside = tuple((key, _kind(child)) for key, child in children)
    if len(inside) > 1 and isinstance(value, list | tuple):
        kinds = {each for _, each in inside}
        if len(kinds) == 1 and not isinstance(children[0][1], _BY_VALUE):
            return kind, kinds.pop()  # as many as there may be: a list per row
    return kind, inside
