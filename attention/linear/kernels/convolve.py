"""What comes before the rule: the gates, and the short convolution with SiLU over the requests' windows in the pool.

    few tokens    a program has all tokens of a request and moves its window on at the end
    many tokens   a program has one chunk of a request; windows move on in a second launch, when nobody reads them

Every program has some channels, which no other one reads or writes. A window moves from its oldest row on: a row is
taken from a later one, or from the tokens, before anything is written there.

The gates are the decay and strength of writing, of all tokens and heads in one launch:

    g = rate softplus(a + bias)         beta = sigmoid(b)
"""

import torch
import triton.language as tl
from torch import Tensor

from attention.linear.kernels.records import read_record
from ubatch.kernels import rows_contiguous
from ubatch.kernels.triton_jit import INTERPRETED, cdiv, jit, power_of_2, undefined

_BLOCK = 256


@jit("a", "b", "size")
def _gates_kernel(
    a: tl.tensor,
    a_stride: tl.tensor,
    b: tl.tensor,
    b_stride: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    token, head = place // HEADS, place % HEADS
    x = tl.load(a + token * a_stride + head, mask=inside, other=0).to(tl.float32)
    x += tl.load(bias + head, mask=inside, other=0)
    # softplus, exact for very negative x, too: log(1 + y) loses a small y, and the quotient gives it back.
    y = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + y
    small = tl.where(more == 1.0, y, tl.log(more) * (y / tl.where(more == 1.0, 1.0, more - 1.0)))
    decay = tl.load(rate + head, mask=inside, other=0) * tl.where(x > 20.0, x, small)
    strength = tl.sigmoid(tl.load(b + token * b_stride + head, mask=inside, other=0).to(tl.float32))
    row = out + token * (2 * HEADS) + head
    tl.store(row, decay, mask=inside)
    tl.store(row + HEADS, strength, mask=inside)


def delta_gates(a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """`g` and `beta`, `[T, heads]` float32 each, side by side in memory.

    Args:
        a, b: `[T, heads]`; rows may be strided.
        rate, bias: `[heads]` float32.
    """
    a, b = rows_contiguous(a), rows_contiguous(b)
    heads = a.shape[1]
    out = torch.empty(a.shape[0], 2 * heads, dtype=torch.float32, device=a.device)
    if size := a.numel():
        _gates_kernel[cdiv(size, _BLOCK),](
            a, a.stride(0), b, b.stride(0), rate, bias, out, size, HEADS=heads, BLOCK=_BLOCK
        )
    g, beta = out.split(heads, dim=-1)
    return g, beta


_MIN_BLOCK, _MAX_BLOCK = 64, 512  # channels of a program with many tokens, and with one


@jit()
def _move_window(
    inputs: tl.tensor,
    stride: tl.tensor,
    window: tl.tensor,
    count: tl.tensor,
    fresh: tl.tensor,
    channels: tl.tensor,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
) -> None:
    """`inputs` and `window` point to a program's channels of the request's first token, and of its oldest row."""
    for row in tl.static_range(TAPS - 1):
        token = count + (row - (TAPS - 1))
        new = tl.load(inputs + token * stride, mask=channels < tl.where(token >= 0, DIM, 0), other=0)
        held = tl.load(
            window + (count + row) * DIM, mask=channels < tl.where((token < 0) & (fresh == 0), DIM, 0), other=0
        )
        tl.store(window + row * DIM, tl.where(token >= 0, new, held), mask=channels < DIM)


@jit("chunks")
def _convolve_kernel(
    inputs: tl.tensor,
    stride: tl.tensor,
    windows: tl.tensor,
    conv: tl.tensor,
    out: tl.tensor,
    kept: tl.tensor,
    records: tl.tensor,
    chunks: tl.tensor,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    KEEP: tl.constexpr,
    MOVE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    start = request * 0
    if chunks is not None:
        chunk = chunks + request * 2
        request, start = tl.load(chunk), tl.load(chunk + 1)
    slot, fresh, source, target, count = read_record(records, request, KEPT, NUM_KEPT, WIDTH)
    if count == 0:
        return
    token = start + tl.arange(0, ROWS)[:, None]
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (token < count) & (channels < DIM)[None, :]
    mine, window = inputs + source * stride + channels, windows + slot * ((TAPS - 1) * DIM) + channels
    summed = tl.zeros([ROWS, BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        place = token + (tap - (TAPS - 1))
        new = tl.load(mine[None, :] + place * stride, mask=inside & (place >= 0), other=0)
        if tap < TAPS - 1:
            # Of a request that begins, rows before it are 0, whatever the slot holds.
            held = inside & (place < tl.where(fresh == 0, 0, -TAPS))
            old = tl.load(window[None, :] + (token + tap) * DIM, mask=held, other=0)
            new = tl.where(place >= 0, new, old)
        elif KEEP:
            tl.store(kept + (slot * NUM_KEPT + token) * DIM + channels[None, :], new, mask=inside)
        summed += new.to(tl.float32) * tl.load(conv + tap * DIM + channels, mask=channels < DIM, other=0)[None, :]
    tl.store(out + (target + token) * DIM + channels[None, :], summed * tl.sigmoid(summed), mask=inside)
    if MOVE:
        tl.debug_barrier()  # other threads may still read the rows
        _move_window(mine, stride, window, count, fresh, channels, DIM, TAPS)


@jit()
def _move_windows_kernel(
    inputs: tl.tensor,
    stride: tl.tensor,
    windows: tl.tensor,
    records: tl.tensor,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    slot, fresh, source, _target, count = read_record(records, request, False, 0, WIDTH)
    if count == 0:
        return
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    window = windows + slot * ((TAPS - 1) * DIM) + channels
    _move_window(inputs + source * stride + channels, stride, window, count, fresh, channels, DIM, TAPS)


def convolve(
    inputs: Tensor,
    windows: Tensor,
    conv: Tensor,
    records: Tensor,
    *,
    chunks: Tensor | None,
    rows: int,
    num_kept: int,
    kept: Tensor | None = None,
    of_kept: bool = False,
    write: bool,
) -> Tensor:
    """The convolution's output after SiLU, in the dtype of `inputs`: `[T, conv_dim]`, `[R * num_kept, conv_dim]` of
    kept tokens. Rows of padding are undefined.

    Args:
        inputs: `[T, conv_dim]`, rows may be strided; of kept tokens all that the layer keeps, `[slots * num_kept, ..]`.
        windows: `[slots, conv_kernel - 1, conv_dim]`, dense.
        conv: `[conv_kernel, conv_dim]` float32.
        records: `[R, 6]` int64, see `records`.
        chunks: `[N, 2]` int64, request and first token of every chunk; None if requests have few tokens.
        rows: most tokens of a program, a power of two: those of a chunk, or of a request.
        kept: `[slots * num_kept, conv_dim]`, which takes every token's input; None keeps none.
        of_kept: the tokens are the accepted ones of those that are kept.
        write: windows move on.
    """
    inputs = rows_contiguous(inputs)
    requests, taps, dim = records.shape[0], *conv.shape
    tokens = requests * num_kept if of_kept else inputs.shape[0]
    out = undefined(tokens, dim, dtype=inputs.dtype, device=inputs.device)
    block = power_of_2(dim) if INTERPRETED else min(power_of_2(dim), max(_MIN_BLOCK, _MAX_BLOCK // rows))
    parts = cdiv(dim, block)
    alone = chunks is None
    _convolve_kernel[requests if chunks is None else chunks.shape[0], parts](
        *(inputs, inputs.stride(0), windows, conv, out, kept, records, chunks),
        WIDTH=records.shape[1],
        DIM=dim,
        TAPS=taps,
        ROWS=rows,
        KEPT=of_kept,
        NUM_KEPT=num_kept,
        KEEP=kept is not None,
        MOVE=write and alone and taps > 1,
        BLOCK=block,
    )
    if write and not alone and taps > 1:
        _move_windows_kernel[requests, parts](
            *(inputs, inputs.stride(0), windows, records), WIDTH=records.shape[1], DIM=dim, TAPS=taps, BLOCK=block
        )
    return out
