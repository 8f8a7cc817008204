"""What a prompt's chunks need before any state is known; see `attention.linear.delta_rule` for the equations.

    for every chunk and head, at once:
        decays from the chunk's start, to its end, and between tokens
        tril((d_i / d_j) Q K^T)
        (I + A)^-1   blocks of 16 on the diagonal, all at once, by forward substitution; then, of two neighbours with
                     inverses P and Q, and the part B of A below the first, the inverse has -Q B P there

No power of A is ever formed: those of keys that are alike would be huge.

Queries and keys are multiplied as they are stored, and normalised afterwards: products of 16-bit numbers are exact, and
`scan` reads no other ones. The inverse is of float32 numbers, which tensor cores round to TF32; see `precision`.
"""

import torch
import triton.language as tl
from torch import Tensor

from attention.linear.kernels.records import read_record
from attention.linear.states import GatedDeltaShape
from ubatch.kernels.triton_jit import INTERPRETED, constant, jit, power_of_2, undefined

_BLOCK, _LOG_BLOCK = constant(16), constant(4)
_GRAIN = constant(2048)
_LEAST = constant(-128)  # whose exponential is 0
_KEYS, _NUM_STAGES = 32, 2  # elements of keys at once: three products of TF32 of more would spill registers
SMALLEST = 16  # side of a tile in a product

Prepared = tuple[Tensor, Tensor, Tensor]
"""Per chunk and head: the inverse with columns times beta, `[C, C]`; what queries read of the chunk's values, `[C, C]`;
and factors of rows, `[4, C]`: decays from the start, the same for keys and for queries, and decays to the end for keys;
those for queries and keys include normalisation. All float32."""


def precision(dtype: torch.dtype) -> str:
    """How tensor cores multiply float32 numbers when activations have this dtype.

    Next to bfloat16, by one product of TF32: it keeps 10 bits, and queries, keys and values have 7. Errors do not pile
    up: a state is decayed and added to in float32, and later tokens correct what it holds. Next to float32 and float16,
    by three, which are nearly float32.
    """
    return "tf32" if dtype == torch.bfloat16 else "tf32x3"


@jit()
def product(a: tl.tensor, b: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """`a b`; see `precision`."""
    return tl.dot(a, b, input_precision=PRECISION)


@jit()
def _inverse(system: tl.tensor, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """`(I + system)^-1` of a matrix that is 0 on and above its diagonal."""
    BLOCKS: tl.constexpr = CHUNK // _BLOCK
    block, number = tl.arange(0, BLOCKS), tl.arange(0, _BLOCK)
    diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    row, column = number[None, :, None], number[None, None, :]
    part = tl.sum(tl.where(diagonal, tl.reshape(system, [BLOCKS, _BLOCK, BLOCKS, _BLOCK]), 0.0), 2)
    solved = tl.where(row == column, 1.0, 0.0) + tl.zeros([BLOCKS, 1, 1], tl.float32)
    for step in tl.static_range(_BLOCK - 1):  # row `step` is solved; take it out of the rows below
        factors = tl.sum(tl.where(column == step, part, 0.0), 2, keep_dims=True)
        solved -= factors * tl.sum(tl.where(row == step, solved, 0.0), 1, keep_dims=True)
    inverse = tl.reshape(tl.where(diagonal, solved[:, :, None, :], 0.0), [CHUNK, CHUNK])
    place = tl.arange(0, CHUNK)
    for level in tl.static_range(_LOG_BLOCK, LEVELS):
        block_row, block_column = place[:, None] >> level, place[None, :] >> level
        below = (block_row > block_column) & (block_row >> 1 == block_column >> 1)
        inverse -= product(product(inverse, tl.where(below, system, 0.0), PRECISION), inverse, PRECISION)
    return inverse


@jit("chunks")
def _prepare_kernel(
    mixed: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    stride: tl.tensor,
    inverses: tl.tensor,
    scores: tl.tensor,
    factors: tl.tensor,
    records: tl.tensor,
    chunks: tl.tensor,
    scale: tl.tensor,
    most: tl.tensor,
    WIDTH: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request, start = tl.load(chunks + chunk * 2), tl.load(chunks + chunk * 2 + 1)
    _slot, _fresh, source, _target, count = read_record(records, request, False, 0, WIDTH)
    if count <= most:
        return
    number = tl.arange(0, CHUNK)
    tokens, inside = source + start + number, start + number < count
    gate = tokens * stride + head
    decay, strength = tl.load(g + gate, mask=inside, other=0), tl.load(beta + gate, mask=inside, other=0)
    # Sums may be in the thousands, and near ones almost equal: those of coarse parts are exact, of the rest tiny.
    decay = tl.where(decay < _LEAST, _LEAST, decay)
    coarse = tl.floor(decay * _GRAIN) / _GRAIN
    fine = decay - coarse
    high, low = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)

    channels = mixed + tokens[:, None] * DIM + (head // (V_HEADS // K_HEADS)) * K_DIM
    scored, alike = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    q_square, k_square = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for first in range(0, K_DIM, KEYS):
        key = first + tl.arange(0, KEYS)
        used = inside[:, None] & (key < K_DIM)[None, :]
        q = tl.load(channels + key[None, :], mask=used, other=0)
        k = tl.load(channels + K_HEADS * K_DIM + key[None, :], mask=used, other=0)
        if UPCAST:
            q, k = q.to(tl.float32), k.to(tl.float32)
        scored += product(q, tl.trans(k), PRECISION)
        alike += product(k, tl.trans(k), PRECISION)
        q, k = q.to(tl.float32), k.to(tl.float32)
        q_square += tl.sum(q * q, 1)
        k_square += tl.sum(k * k, 1)
    q_norm, k_norm = tl.rsqrt(q_square + 1e-6) * scale, tl.rsqrt(k_square + 1e-6)

    own = chunk * V_HEADS + head
    since, until = tl.exp(high + low), tl.exp((tl.sum(coarse, 0) - high) + (tl.sum(fine, 0) - low))
    factor = factors + own * (4 * CHUNK) + number
    tl.store(factor, since)
    tl.store(factor + CHUNK, since * k_norm)
    tl.store(factor + 2 * CHUNK, since * q_norm)
    tl.store(factor + 3 * CHUNK, until * k_norm)

    row, column = number[:, None], number[None, :]
    passed = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    # Filled before `exp`: from a later token to an earlier one it would overflow.
    between = tl.exp(tl.where(row >= column, passed, float("-inf"))) * k_norm[None, :]
    place = own * (CHUNK * CHUNK) + row * CHUNK + column
    tl.store(scores + place, scored * between * q_norm[:, None])
    system = tl.where(row > column, alike * between * (strength * k_norm)[:, None], 0.0)
    tl.store(inverses + place, _inverse(system, CHUNK, LEVELS, PRECISION) * strength[None, :])


def prepare_chunks(
    mixed: Tensor,
    g: Tensor,
    beta: Tensor,
    records: Tensor,
    chunks: Tensor,
    shape: GatedDeltaShape,
    *,
    chunk: int,
    most: int,
    num_warps: int,
) -> Prepared:
    """Prepare the chunks of requests with more than `most` tokens; arguments as of `scan_chunks`."""
    programs = chunks.shape[0], shape.num_v_heads
    inverses, scores, factors = (
        undefined(*programs, rows, chunk, dtype=torch.float32, device=mixed.device) for rows in (chunk, chunk, 4)
    )
    _prepare_kernel[programs](
        *(mixed, g, beta, g.stride(0), inverses, scores, factors, records, chunks, shape.k_dim**-0.5, most),
        WIDTH=records.shape[1],
        K_HEADS=shape.num_k_heads,
        V_HEADS=shape.num_v_heads,
        K_DIM=shape.k_dim,
        DIM=shape.conv_dim,
        CHUNK=chunk,
        LEVELS=chunk.bit_length() - 1,
        KEYS=min(power_of_2(shape.k_dim, SMALLEST), _KEYS),
        PRECISION=precision(mixed.dtype),
        UPCAST=INTERPRETED,
        num_warps=num_warps,
        num_stages=_NUM_STAGES,
    )
    return inverses, scores, factors
