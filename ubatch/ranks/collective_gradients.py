"""Gradients of collectives. A collective is a linear map of all ranks' inputs, so its transpose computes the gradients.

    all_reduce         every rank gets the sum             all_reduce of the gradients
    all_gather         every rank gets every block         reduce_scatter: the sum over ranks of one's own block
    reduce_scatter     a rank gets its block of the sum    all_gather
    all_to_all         ranks exchange blocks                 all_to_all with the split sizes swapped

So a rank's gradient is the gradient of the sum of all ranks' losses, as with `torch.distributed.nn`. The transpose of a
transpose is the map itself, which gives second-order gradients; a linear map applied to a tangent gives forward-mode
gradients.

Autograd may run the transpose in its own thread (on CUDA), which has none of the caller's contextvars. The only one
needed, the connection that leads the step, is passed along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ubatch.lanes.context import current_lane
from ubatch.lanes.torch_modes import function_transform
from ubatch.ranks.connection import lead_again, leading_connection

Map = Callable[[Tensor], Tensor]


def differentiable(x: Tensor, run: Map, transpose: Map) -> Tensor:
    """`run(x)`, with a gradient if `x` needs one. In a lane gradients are not supported, and `run` refuses.

    Args:
        run: a collective along the first dimension, or on all elements alike.
        transpose: the collective that maps a gradient of `run(x)`'s shape to one of `x`'s shape.
    """
    if current_lane() is None and ((x.requires_grad and torch.is_grad_enabled()) or function_transform() is not None):
        return _applied(x, run, transpose)
    return run(x)


def _applied(x: Tensor, run: Map, transpose: Map) -> Tensor:
    return cast("Tensor", _Collective.apply(x, run, transpose))  # type: ignore[no-untyped-call]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, run: Map, transpose: Map) -> Tensor:
        return run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Map, Map], output: Tensor) -> None:
        _, ctx.run, ctx.transpose = inputs
        ctx.leader = leading_connection()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        with lead_again(ctx.leader):
            return _applied(grad, ctx.transpose, ctx.run), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _applied(tangent, ctx.run, ctx.transpose)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None], x: Tensor, run: Map, transpose: Map) -> tuple[Tensor, int]:
        """The batch dimension becomes the last dimension."""
        return _applied(x.movedim(in_dims[0], -1), run, transpose), -1
