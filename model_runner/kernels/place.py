"""One launch that copies a lane's tokens to the static inputs of a captured graph, and pads the rest."""

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
