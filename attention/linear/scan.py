"""The gated delta rule on a CPU in C (`scan.c`): each state is read and written once, whatever the number of tokens.

torch passes over all states several times for a token, and over all tokens several times for a chunk. Callers check
with `runs_in_c` that the kernel takes their tensors; the reference is in `attention.linear.delta_rule`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ubatch.kernels import compile_c, kernel_of


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    fresh: Tensor,
    starts: Tensor,
    *,
    write: bool,
) -> Tensor:
    """All tokens of R requests, `[T, v_heads, v_dim]`.

    Args:
        q, k: `[T, k_heads, k_dim]` float32, normalised, dense.
        v: `[T, v_heads, v_dim]` float32, dense.
        g, beta: `[T, v_heads]` float32, dense in the last dimension, with the same stride.
        states: `[slots, v_heads, k_dim, v_dim]` float32, dense; changed in place.
        slots: `[R]` int64, where each request's state is; all different.
        fresh: `[R]` bool, whether a request begins with zeros instead.
        starts: `[R + 1]` int64, each request's first token, and their number.
        write: whether the states change.
    """
    out = torch.empty_like(v)
    _kernel()(
        *(states.data_ptr(), slots.data_ptr(), fresh.data_ptr(), starts.data_ptr(), len(slots)),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr(), g.stride(0), out.data_ptr()),
        *(q.shape[1], *states.shape[1:], write, torch.get_num_threads()),
    )
    return out


@cache
def _kernel(**defines: int) -> Callable[..., None]:
    source = Path(__file__).with_name("scan.c").read_text(encoding="utf-8")
    pointer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    types = (*[pointer] * 4, number, *[pointer] * 5, number, pointer, *[number] * 4, flag, flag)
    return kernel_of(compile_c(source, **defines), "scan", *types)
