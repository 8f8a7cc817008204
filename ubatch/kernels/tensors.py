"""What kernels ask of their tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ubatch.kernels.c_jit import why_not_c
from ubatch.kernels.recording import this_thread


def rows_contiguous(x: Tensor) -> Tensor:
    """`x` itself if its last dimension is contiguous, else a copy: kernels take strides for the other dimensions
    only."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


_FLOATS = (torch.float32, torch.bfloat16)


def runs_in_c(x: Tensor, *others: Tensor, dtypes: Sequence[torch.dtype] = _FLOATS) -> bool:
    """Whether a kernel in C may compute with these tensors in place of torch's operators.

    They must be on the CPU, and of one of the dtypes. Torch computes if a gradient is wanted, if
    `torch.compile` traces, or if a `TorchDispatchMode` is active, which wants to see every operator.
    """
    dtype, wants_gradients = x.dtype, torch.is_grad_enabled()
    if dtype not in dtypes or why_not_c() is not None:
        return False
    own_modes = 0 if this_thread.recording is None else 1
    if torch._C._len_torch_dispatch_stack() > own_modes or torch.compiler.is_compiling():
        return False
    for each in (x, *others):
        if not each.is_cpu or each.dtype is not dtype or (wants_gradients and each.requires_grad):
            return False
    return True
