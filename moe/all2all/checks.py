"""What no transport carries between ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ubatch import ConfigError, GradientError


def check_dispatch(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, name: str) -> None:
    """Refuse tensors that cannot be sent between ranks.

    Raises:
        GradientError: gradients would be lost on the way.
        ConfigError: a dtype without a place in the payload.
    """
    if torch.is_grad_enabled():
        refuse_gradients(x, topk_weights, name=name)
    if not x.is_floating_point() or topk_weights.dtype != torch.float32 or topk_ids.dtype != torch.int64:
        raise ConfigError(
            f"dispatch needs floating hidden states, float32 weights and int64 ids, not {x.dtype}, "
            f"{topk_weights.dtype} and {topk_ids.dtype}."
        )


def refuse_gradients(*tensors: Tensor, name: str) -> None:
    """Gradients do not travel between ranks, inside a lane or not.

    Raises:
        GradientError: a tensor requires grad, and grad mode is on.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise GradientError(
            f"all2all back end {name!r} got a tensor that requires grad, but gradients do not travel between ranks. "
            "Run under torch.no_grad() or torch.inference_mode()."
        )
