"""One row per token: hidden state, expert ids and weights in one message.

    | x: H elements of the hidden dtype | ids: k int32 | weights: k float32 |

The 8k bytes behind the hidden state are a whole number of elements of every floating dtype, so a row is a plain
tensor row of that dtype and three messages become one.

`check_dispatch` and `refuse_gradients` refuse what no transport carries between ranks.
"""

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


def pack_rows(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Rows ready to travel.

    Args:
        x: `[T, H]`, floating.
        topk_ids: `[T, k]`, any integer dtype; must fit int32.
        topk_weights: `[T, k]` float32.

    Returns:
        `[T, H + 8k / itemsize]` of the dtype of `x`.
    """
    routing = torch.cat([topk_ids.to(torch.int32), topk_weights.view(torch.int32)], dim=1)
    return torch.cat([x, routing.view(x.dtype)], dim=1)


def unpack_rows(rows: Tensor, hidden_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `pack_rows`.

    Args:
        rows: `[N, H + 8k / itemsize]`.

    Returns:
        `x [N, H]` (a strided view, not a copy), `topk_ids [N, k]` int32 and `topk_weights [N, k]` float32.
    """
    routing = rows[:, hidden_size:].clone(memory_format=torch.contiguous_format).view(torch.int32)  # aligned
    topk_ids, weight_bits = routing.chunk(2, dim=1)
    return rows[:, :hidden_size], topk_ids, weight_bits.view(torch.float32)
