"""What kernels ask of their tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ubatch.kernels.c_jit import why_not_c
from ubatch.kernels.recording import this_thread


def rows_contiguous(x: Tensor) -> Tensor:
    """`x` itself if its last dimension is contiguous, else a copy: kernels take strides for the other dimensions
    only."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def runs_in_c(x: Tensor, *others: Tensor) -> bool:
    """Whether a kernel in C may compute with these tensors in place of torch's operators.

    They must be on the CPU, of one dtype, float32 or bfloat16. Torch computes if a gradient is wanted, if
    `torch.compile` traces, or if a `TorchDispatchMode` is active, which wants to see every operator.
    """
    dtype, wants_gradients = x.dtype, torch.is_grad_enabled()
    if not (dtype is torch.bfloat16 or dtype is torch.float32) or why_not_c() is not None:
        return False
    own_modes = 0 if this_thread.recording is None else 1
    if torch._C._len_torch_dispatch_stack() > own_modes or torch.compiler.is_compiling():
        return False
    for each in (x, *others):
        if not each.is_cpu or each.dtype is not dtype or (wants_gradients and each.requires_grad):
            return False
    return True
