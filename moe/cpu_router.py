"""The routers on a CPU, as one kernel in C (`moe/kernels/route.c`); `moe.router` has the torch reference."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ubatch.kernels import compile_c, kernel_of, rows_contiguous

MOST_EXPERTS = 4096
"""More do not fit on the kernel's stack."""


def route_topk(
    logits: Tensor,
    top_k: int,
    *,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = False,
    scale: float = 1.0,
    num_tokens: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose every token's experts; arguments and results as `moe.kernels.router.route_topk`.

    Args:
        logits: `[T, E]` float32 or bfloat16, E up to `MOST_EXPERTS`.
    """
    rows, experts = logits.shape
    logits = logits if logits.stride(1) == 1 else rows_contiguous(logits)
    if bias is not None:
        bias = bias.float().contiguous()
    weights = torch.empty(rows, top_k, dtype=torch.float32, device="cpu")
    ids = torch.empty(rows, top_k, dtype=torch.int64, device="cpu")
    _kernel(logits.dtype)(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        rows if num_tokens is None else int(num_tokens),
        experts,
        top_k,
        num_groups,
        top_groups,
        2 if sigmoid and experts > num_groups else 1,
        sigmoid,
        renormalize,
        scale,
        None if bias is None else bias.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
        torch.get_num_threads(),
    )
    return weights, ids


@cache
def _kernel(dtype: torch.dtype, **defines: int) -> Callable[..., None]:
    source = (Path(__file__).parent / "kernels" / "route.c").read_text(encoding="utf-8")
    library = compile_c(source, BFLOAT16=int(dtype is torch.bfloat16), **defines)
    pointer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    settings = (*[number] * 8, flag, flag, ctypes.c_float)
    return kernel_of(library, "route", pointer, *settings, pointer, pointer, pointer, flag)
