"""Small operations between a layer's matrix products: one kernel of `model_runner.kernels` each, or torch's.

The kernels are Triton's on a GPU and in C on a CPU. The torch versions here run where neither can be compiled, or if
gradients are wanted; they are also the kernels' reference. The kernels round once; torch rounds after every operation.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from model_runner.decoder.rope import Rotation
from model_runner.kernels import small_ops
from ubatch.kernels import runs_in_c

_KERNELS_ON = "cuda"
"""Where Triton's kernels run; tests run them on a CPU, interpreted."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last dimension, computed in fp32; shape and dtype of `x`."""
    if x.device.type == _KERNELS_ON and _fuses(x):
        from model_runner.kernels import layer_ops

        return layer_ops.rms_norm(x, weight, eps)
    if runs_in_c(x, weight):
        return small_ops.rms_norm(x, weight, eps)
    return _torch_norm(x, weight, eps)


def add_rms_norm(update: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual, and normalise the sum.

    Args:
        update: `[T, hidden_size]`, a layer's output.
        residual: same shape; not changed.
        weight: `[hidden_size]`, of the norm.

    Returns:
        The normalised sum, and the sum.
    """
    if residual.device.type == _KERNELS_ON and _fuses(residual):
        from model_runner.kernels import layer_ops

        return layer_ops.add_rms_norm(update, residual, weight, eps)
    if runs_in_c(update, residual, weight):
        return small_ops.add_rms_norm(update, residual, weight, eps)
    summed = residual + update
    return _torch_norm(summed, weight, eps), summed


def normalise_and_rotate(heads: Tensor, rotation: Rotation, weight: Tensor | None, eps: float | None) -> Tensor:
    """Normalise query and key heads (if the family does), and apply the rotary embedding to their first dimensions.

    Args:
        heads: `[T, heads, head_dim]`, a slice of a fused projection; it may be overwritten.
        weight: `[heads, head_dim]`, weights of the heads' norms; None for a family without them.
        eps: epsilon of the norms; None for a family without them.
    """
    if heads.device.type == _KERNELS_ON and _fuses(heads):
        from model_runner.kernels.layer_ops import rotate_heads

        rotate_heads(heads, rotation.cos, rotation.sin, weight, eps)
        return heads
    if heads.stride(2) == 1 and runs_in_c(heads, *(() if weight is None else (weight,))):
        small_ops.rotate_heads(heads, rotation.cos, rotation.sin, weight, eps)
        return heads
    if weight is not None:
        if weight.dtype is not heads.dtype:
            heads = (F.rms_norm(heads.float(), (heads.shape[-1],), None, eps) * weight).to(heads.dtype)
        else:
            heads = F.rms_norm(heads, (heads.shape[-1],), None, eps) * weight
    return rotation.rotate(heads)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`, `[T, size]`, of `[T, 2 * size]`: the gates, then the ups."""
    if gate_up.device.type == _KERNELS_ON and _fuses(gate_up):
        from model_runner.kernels import layer_ops

        return layer_ops.silu_mul(gate_up)
    if runs_in_c(gate_up) and gate_up.stride(1) == 1:
        return small_ops.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """`sigmoid(gate) * x`, `[T, size]`, of gates `[T, size]` or `[T, 1]`."""
    if x.device.type == _KERNELS_ON and _fuses(x):
        from model_runner.kernels import layer_ops

        return layer_ops.sigmoid_mul(gate, x)
    if runs_in_c(gate, x) and gate.stride(-1) == 1 and x.stride(-1) == 1:
        return small_ops.sigmoid_mul(gate, x)
    return torch.sigmoid(gate) * x


def _torch_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    size = (x.shape[-1],)
    if weight.dtype is x.dtype:
        return F.rms_norm(x, size, weight, eps)
    return F.rms_norm(x.float(), size, weight, eps).to(x.dtype)  # zero-centred weights are kept in float32


def _fuses(x: Tensor) -> bool:
    """Whether the Triton kernel is used for `x`, on its device."""
    return _has_triton() and not (x.requires_grad and torch.is_grad_enabled())


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
