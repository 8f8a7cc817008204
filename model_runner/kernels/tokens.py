"""A step's token ids on the device, one launch each on the forward stream.

place      copies a lane's tokens to the static inputs of a captured graph, and pads the rest
store      keeps sampled tokens that the host does not know yet; `model_runner.step.future_map` has the reference
resolve    looks them up in the next step
"""

import torch
import triton.language as tl
from torch import Tensor

from ubatch.kernels.triton_jit import cdiv, jit

_BLOCK = 256  # tokens that one program moves; the same for all sizes, so that the kernel is compiled once


@jit("ids", "positions", "first", "count", "start", "rows", "lane")
def _place_kernel(
    static_ids: tl.tensor,
    static_positions: tl.tensor,
    num_valid: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    start: tl.tensor,
    rows: tl.tensor,
    lane: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real, inside = token < count, token < rows
    tl.store(static_ids + start + token, tl.load(ids + first + token, mask=real, other=0), mask=inside)
    tl.store(static_positions + start + token, tl.load(positions + first + token, mask=real, other=0), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(num_valid + lane, count.to(tl.int64))


def place_lane(
    static: tuple[Tensor, Tensor, Tensor], batch: tuple[Tensor, Tensor], tokens: slice, start: int, rows: int, lane: int
) -> None:
    """Copy a lane's ids and positions, pad them with 0, and store the number of tokens. The reference is
    `place_in_torch` in `model_runner.graphs.steps`.

    Args:
        static: written, int64: ids `[max_tokens]`, positions `[max_tokens]`, and number of tokens per lane `[lanes]`.
        batch: ids and positions of the whole batch, `[T]` int64 each.
        tokens: the lane's tokens in the batch.
        start: the lane's first row in the graph.
        rows: number of the lane's rows in the graph.
    """
    count = tokens.stop - tokens.start
    _place_kernel[(cdiv(rows, _BLOCK),)](*static, *batch, tokens.start, count, start, rows, lane, BLOCK=_BLOCK)


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
