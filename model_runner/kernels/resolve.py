"""Tokens that the host does not know yet: stored on the device after sampling, and looked up in the next step.

One launch each, on the forward stream. `model_runner.step.future_map` has the references.
"""

import torch
import triton.language as tl
from torch import Tensor

from ubatch.kernels.triton_jit import cdiv, jit

_BLOCK = 256


@jit("out", "input_ids", "future", "count")
def _resolve_kernel(
    out: tl.tensor, input_ids: tl.tensor, future: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    token = tl.load(input_ids + index, mask=inside, other=0)
    pending = token < 0
    sampled = tl.load(future - token, mask=inside & pending, other=0)
    tl.store(out + index, tl.where(pending, sampled, token), mask=inside)


@jit("future", "places", "tokens", "count")
def _store_kernel(
    future: tl.tensor, places: tl.tensor, tokens: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    place = tl.load(places + index, mask=inside, other=0)
    tl.store(future + place, tl.load(tokens + index, mask=inside, other=0), mask=inside)


def resolve_tokens(input_ids: Tensor, future: Tensor) -> Tensor:
    """`input_ids` with every id `-place` replaced by the token at that place. `[T]` int64.

    Args:
        input_ids: `[T]` int64, dense; ids below 0 are places. Not changed.
        future: `[places]` int64.
    """
    out = torch.empty_like(input_ids)
    count = input_ids.shape[0]
    if count:
        _resolve_kernel[(cdiv(count, _BLOCK),)](out, input_ids, future, count, _BLOCK)
    return out


def store_tokens(future: Tensor, places: Tensor, tokens: Tensor) -> None:
    """Write every token to its place.

    Args:
        future: `[places]` int64; written.
        places: `[S]` int64, dense, without duplicates.
        tokens: `[S]` of any integer dtype, dense.
    """
    count = places.shape[0]
    if count:
        _store_kernel[(cdiv(count, _BLOCK),)](future, places, tokens, count, _BLOCK)
