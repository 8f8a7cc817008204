"""Sums and conversions of rows: on a CPU in C, so that a step which has them can be recorded; else by torch. And what
kernels ask of their tensors.

Numbers are those of torch: computed in float32 and rounded once.
"""

import ctypes
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from ubatch.kernels.c_jit import compile_c, kernels_of, why_not_c
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


def add(x: Tensor, y: Tensor) -> Tensor:
    """`x + y`, both `[rows, size]` of one dtype."""
    if x.shape != y.shape or not (_rows_in_c(x, y) and _rows_in_c(y)):
        return x + y
    rows, size = x.shape
    out, threads = x.new_empty(rows, size), torch.get_num_threads()
    _kernels(x.dtype).add(x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), rows, size, out.data_ptr(), threads)
    return out


def add_bias(sums: Tensor, bias: Tensor) -> Tensor:
    """`sums` `[..., size]` in float32, plus a bias `[size]`, in the bias's dtype; `sums` may be overwritten."""
    if not (_rows_in_c(sums) and bias.is_contiguous() and runs_in_c(bias)):
        return sums.add_(bias).to(bias.dtype)
    rows, size = sums.shape
    out, threads = bias.new_empty(rows, size), torch.get_num_threads()
    _kernels(bias.dtype).add_bias(sums.data_ptr(), sums.stride(0), bias.data_ptr(), rows, size, out.data_ptr(), threads)
    return out


def to_float(x: Tensor) -> Tensor:
    """`x` in float32; itself if it is."""
    if x.dtype is torch.float32 or not _rows_in_c(x):
        return x.to(torch.float32)
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=torch.float32, device="cpu")
    _kernels(x.dtype).to_float(x.data_ptr(), x.stride(0), rows, size, out.data_ptr(), torch.get_num_threads())
    return out


def _rows_in_c(x: Tensor, *others: Tensor) -> bool:
    return x.dim() == 2 and x.stride(1) == 1 and runs_in_c(x, *others)


@cache
def _kernels(dtype: torch.dtype) -> SimpleNamespace:
    """The functions of `sums.c` for one dtype."""
    source = Path(__file__).with_name("sums.c").read_text(encoding="utf-8")
    library = compile_c(source, BFLOAT16=int(dtype is torch.bfloat16))
    pointer, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    rows = (pointer, number)
    return kernels_of(
        library,
        add=(*rows * 2, number, number, pointer, threads),
        add_bias=(*rows, pointer, number, number, pointer, threads),
        to_float=(*rows, number, number, pointer, threads),
    )
