"""What kernels ask of their tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ubatch.kernels.c_jit import why_not_c
from ubatch.kernels.recording import recording

__all__ = ["rows_contiguous", "runs_in_c"]


def rows_contiguous(x: Tensor) -> Tensor:
    """`x` itself if its last dimension is contiguous, else a copy: kernels take strides for the other dimensions
    only."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def runs_in_c(x: Tensor, *others: Tensor) -> bool:
    """Whether a kernel in C may compute with these tensors in place of torch's operators.

    They must be on the CPU, of one dtype, float32 or bfloat16. Torch computes if a gradient is wanted, if
    `torch.compile` traces, or if a `TorchDispatchMode` is active, which wants to see every operator.
    """
    dtype = x.dtype
    if not x.is_cpu or not (dtype is torch.bfloat16 or dtype is torch.float32) or why_not_c() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() > recording() or torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() and (x.requires_grad or any(other.requires_grad for other in others)):
        return False
    return all(other.dtype is dtype and other.is_cpu for other in others)
