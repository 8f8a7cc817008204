"""The small operations between products, and greedy sampling, on a CPU in C (`small_ops.c`): one pass over the rows.

torch runs each as several operators, and a decode step in bfloat16 spends more time in them than in products. Callers
check with `runs_in_c` that the kernels take their tensors; the torch reference is in `model_runner.decoder.ops`.
"""

import ctypes
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from ubatch.kernels import compile_c, kernels_of, rows_contiguous


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` `[..., size]` normalised over its last dimension; contiguous.

    Args:
        x: float32 or bfloat16; rows may be strided, as in a slice of a fused projection.
        weight: `[size]`, of the same dtype.
    """
    out, size = torch.empty_like(x, memory_format=torch.contiguous_format), x.shape[-1]
    rows = rows_contiguous(x.reshape(-1, size))
    addresses = rows.data_ptr(), rows.stride(0), weight.data_ptr()
    threads = torch.get_num_threads()
    _kernels(x.dtype).add_norm(None, 0, *addresses, eps, rows.shape[0], size, None, out.data_ptr(), threads)
    return out


def add_rms_norm(update: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of `residual + update`, and the sum, rounded before it is normalised; both contiguous.

    Args:
        update: `[..., size]`, float32 or bfloat16.
        residual: the same shape and dtype.
        weight: `[size]`, of the same dtype.
    """
    size = residual.shape[-1]
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    summed = torch.empty_like(out)
    strides = size, size
    if not (update.is_contiguous() and residual.is_contiguous()):
        update, residual = (rows_contiguous(each.reshape(-1, size)) for each in (update, residual))
        strides = update.stride(0), residual.stride(0)
    inputs = update.data_ptr(), strides[0], residual.data_ptr(), strides[1], weight.data_ptr()
    outputs, rows = (summed.data_ptr(), out.data_ptr()), residual.numel() // size
    _kernels(residual.dtype).add_norm(*inputs, eps, rows, size, *outputs, torch.get_num_threads())
    return out, summed


def rotate_heads(heads: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float | None) -> None:
    """Normalise, if there are weights, and rotate the heads of every token, in place.

    Args:
        heads: `[T, heads, head_dim]`, float32 or bfloat16, dense in the last dimension.
        cos, sin: `[T, 1, rotary_dim]` float32, dense, `rotary_dim` even; see `Rotation`.
        weight: `[heads, head_dim]`, dense, of the heads' dtype; None for heads that are not normalised.
    """
    sizes = heads.stride(0), heads.stride(1), *heads.shape, cos.shape[-1] // 2
    tables = cos.data_ptr(), sin.data_ptr(), None if weight is None else weight.data_ptr()
    _kernels(heads.dtype).rotate_heads(heads.data_ptr(), *sizes, *tables, eps or 0.0, torch.get_num_threads())


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`, `[T, size]`, of `[T, 2 * size]`: the gates, then the ups; rows may be strided."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    threads = torch.get_num_threads()
    _kernels(gate_up.dtype).silu_mul(gate_up.data_ptr(), gate_up.stride(0), rows, size, out.data_ptr(), threads)
    return out


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """`sigmoid(gate) * x`, `[T, size]`, of gates `[T, size]` or `[T, 1]`; rows may be strided."""
    rows, size = x.shape
    out, columns = x.new_empty(rows, size), int(gate.shape[1] > 1)
    inputs = gate.data_ptr(), gate.stride(0), columns, x.data_ptr(), x.stride(0)
    _kernels(x.dtype).sigmoid_mul(*inputs, rows, size, out.data_ptr(), torch.get_num_threads())
    return out


def find_highest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's highest number and its first index; of a row with a nan, the first nan.

    Args:
        x: `[N, size]`, float32 or bfloat16; rows may be strided. `size` is at least 1.

    Returns:
        The indices `[N]` int64, and the numbers `[N]` of the dtype of `x`.
    """
    x = x if x.stride(1) == 1 else rows_contiguous(x)
    rows, size = x.shape
    place, highest = torch.empty(rows, dtype=torch.int64, device="cpu"), x.new_empty(rows)
    outputs = place.data_ptr(), highest.data_ptr()
    _kernels(x.dtype).find_highest(x.data_ptr(), x.stride(0), rows, size, *outputs, torch.get_num_threads())
    return place, highest


def forbid(x: Tensor, rows: Tensor | None, masks: Tensor) -> None:
    """-inf in place of numbers whose bit in a mask is 0.

    Args:
        x: `[N, size]` float32, dense; changed in place.
        rows: `[n]` int64, the row of each mask; None for all rows, in their order.
        masks: `[n, words]` int32, dense; enough bits for `size`.
    """
    (size, (count, words)), threads = (x.shape[1], masks.shape), torch.get_num_threads()
    where = None if rows is None else rows.data_ptr()
    _kernels(torch.float32).forbid(x.data_ptr(), size, where, count, masks.data_ptr(), words, threads)


def find_allowed(x: Tensor, rows: Tensor, masks: Tensor, own: Tensor, none: int) -> Tensor:
    """The first index of the highest number among those whose bit in a mask is 1, `[n]` int64; `none` if there is none
    above -inf. Numbers that are nan are left out.

    Args:
        x: `[N, size]`, float32 or bfloat16; rows may be strided.
        rows: `[n]` int64, dense.
        masks: `[M, words]` int32, dense; enough bits for `size`.
        own: `[n]` int64, dense: the mask of each row.
    """
    x = x if x.stride(1) == 1 else rows_contiguous(x)
    place, (count, words) = torch.empty_like(rows), (rows.shape[0], masks.shape[1])
    inputs = x.data_ptr(), x.stride(0), x.shape[1], rows.data_ptr(), own.data_ptr(), count, masks.data_ptr(), words
    _kernels(x.dtype).find_allowed(*inputs, none, place.data_ptr(), torch.get_num_threads())
    return place


@cache
def _kernels(dtype: torch.dtype, **defines: int) -> SimpleNamespace:
    """The functions of `small_ops.c` for one dtype."""
    source = Path(__file__).with_name("small_ops.c").read_text(encoding="utf-8")
    library = compile_c(source, BFLOAT16=int(dtype is torch.bfloat16), **defines)
    pointer, number, real, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
    rows = (pointer, number)
    return kernels_of(
        library,
        add_norm=(*rows, *rows, pointer, real, number, number, pointer, pointer, threads),
        rotate_heads=(pointer, *[number] * 6, *[pointer] * 3, real, threads),
        silu_mul=(*rows, number, number, pointer, threads),
        sigmoid_mul=(*rows, number, *rows, number, number, pointer, threads),
        find_highest=(*rows, number, number, pointer, pointer, threads),
        forbid=(*rows, pointer, number, *rows, threads),
        find_allowed=(*rows, number, pointer, pointer, number, *rows, number, pointer, threads),
    )
