"""Small operations between a layer's matrix products: torch's, or on a GPU one kernel of `model_runner.kernels` each.

The torch versions here run on a CPU, without Triton, or if gradients are wanted; they are also the kernels' reference.
The kernels round once; torch rounds after every operation.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from model_runner.decoder.rope import Rotation

__all__ = ["add_rms_norm", "normalise_and_rotate", "rms_norm", "silu_mul"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last dimension, computed in fp32; shape and dtype of `x`."""
    if _fuses(x):
        from model_runner.kernels import norm

        return norm.rms_norm(x, weight, eps)
    return _rms_norm(x, weight, eps)


def add_rms_norm(update: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual, and normalise the sum.

    Args:
        update: `[T, hidden_size]`, a layer's output.
        residual: same shape; not changed.
        weight: `[hidden_size]`, of the norm.

    Returns:
        The normalised sum, and the sum.
    """
    if _fuses(residual):
        from model_runner.kernels import norm

        return norm.add_rms_norm(update, residual, weight, eps)
    summed = residual + update
    return _rms_norm(summed, weight, eps), summed


def normalise_and_rotate(heads: Tensor, rotation: Rotation, weight: Tensor | None, eps: float | None) -> Tensor:
    """Normalise query and key heads (if the family does), and apply the rotary embedding.

    Args:
        heads: `[T, heads, head_dim]`, a slice of a fused projection; it may be overwritten.
        weight: `[heads, head_dim]`, weights of the heads' norms; None for a family without them.
        eps: epsilon of the norms; None for a family without them.
    """
    if _fuses(heads):
        from model_runner.kernels.rope import rotate_heads

        rotate_heads(heads, rotation.cos, rotation.sin, weight, eps)
        return heads
    if weight is not None:
        heads = F.rms_norm(heads, (heads.shape[-1],), None, eps) * weight
    return rotation.rotate(heads)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`, `[T, size]`, of `[T, 2 * size]`: the gates, then the ups."""
    if _fuses(gate_up):
        from model_runner.kernels import activation

        return activation.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype is not torch.float32 or x.device.type != "cpu" or (torch.is_grad_enabled() and x.requires_grad):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    # torch squares, averages, scales and weighs in separate passes; with one pass for the sum of squares it takes half.
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight)


def _fuses(x: Tensor) -> bool:
    """Whether the Triton kernel is used for `x`."""
    return x.is_cuda and _has_triton() and not (x.requires_grad and torch.is_grad_enabled())


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
