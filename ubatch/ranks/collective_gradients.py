"""Gradients of collectives. Each is a linear map of what all ranks put in, so its transpose carries the gradients back.

    all_reduce         every rank gets the sum             all_reduce of the gradients
    all_gather         every rank gets every block         reduce_scatter: the sum over ranks of one's own block
    reduce_scatter     a rank gets its block of the sum    all_gather
    all_to_all         blocks change hands                 all_to_all with the split sizes swapped

So a rank's gradient is that of the sum over all ranks of what each of them differentiates, as with
`torch.distributed.nn`. The transpose of a transpose is the map itself, which gives gradients of gradients; a linear map
takes a tangent where it takes its argument, which gives forward-mode ones.

The transpose runs wherever autograd runs it: on CUDA in a thread of torch's own, which has none of the caller's
contextvars. The one that counts, the connection that leads the step, is brought along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ubatch.lanes.context import current_lane
from ubatch.lanes.torch_modes import function_transform
from ubatch.ranks.connection import lead_again, leading_connection

__all__ = ["differentiable"]

Map = Callable[[Tensor], Tensor]


def differentiable(x: Tensor, run: Map, transpose: Map) -> Tensor:
    """`run(x)`, with a gradient where somebody asks for one; in a lane nobody can, and `run` refuses.

    Args:
        x: what this rank puts in.
        run: a collective along the first dimension, or on all elements alike.
        transpose: the collective that takes a gradient back, of `run(x)`'s shape to `x`'s.
    """
    if current_lane() is None and ((x.requires_grad and torch.is_grad_enabled()) or function_transform() is not None):
        return _applied(x, run, transpose)
    return run(x)


def _applied(x: Tensor, run: Map, transpose: Map) -> Tensor:
    result: Tensor = _Collective.apply(x, run, transpose)  # type: ignore[no-untyped-call]
    return result


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
        """What is batched goes along as the last dimension."""
        return _applied(x.movedim(in_dims[0], -1), run, transpose), -1
