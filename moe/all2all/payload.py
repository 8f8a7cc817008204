"""One row per token: hidden state, expert ids and weights in one message.

    | x: H elements of the hidden dtype | ids: k int32 | weights: k float32 |

The 8k bytes behind the hidden state are a whole number of elements of every floating dtype, so a row is a plain
tensor row of that dtype and three messages become one.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
