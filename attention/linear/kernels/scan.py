"""The gated delta rule for prompts, in chunks; see `attention.linear.delta_rule` for the equations.

    prepare   for every chunk and head at once, without states: (I + A)^-1, and tril((d_i / d_j) Q K^T)
    scan      for every request, head and block of columns: its chunks one after another, the state in registers

The inverse grows from blocks of one row: of two neighbours with inverses P and Q, and the part B of A below the first,
the inverse has -Q B P there. All blocks of a size are one product of matrices, and no power of A is ever formed: those
of keys that are alike would be huge.

Products are of three TF32 ones, nearly float32. Requests with few tokens are left to `recur`.
"""

import triton.language as tl
from torch import Tensor

from attention.linear.kernels.records import first_chunk, read_record
from attention.linear.kernels.recur import load_unit_rows
from attention.linear.states import GatedDeltaShape
from ubatch.kernels.triton_jit import INTERPRETED, cdiv, constant, jit, power_of_2, undefined

_COLUMNS = 32  # of a program in `scan`
_SMALLEST = 16  # side of a tile in a product
_PRECISION = constant("tf32x3")  # type: ignore[arg-type]


@jit()
def _product(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.dot(a, b, input_precision=_PRECISION)


@jit()
def _sums(g: tl.tensor, rows: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Logarithms of the decays from the chunk's start, float64: they may be in the hundreds, near ones almost equal."""
    return tl.cumsum(tl.load(g + rows, mask=inside, other=0).to(tl.float64), 0)


@jit("chunks")
def _prepare_kernel(
    mixed: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    stride: tl.tensor,
    inverses: tl.tensor,
    scores: tl.tensor,
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
) -> None:
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request, start = tl.load(chunks + chunk * 2), tl.load(chunks + chunk * 2 + 1)
    _slot, _fresh, source, _target, count = read_record(records, request, False, 0, WIDTH)
    if count <= most:
        return
    number, key = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    tokens, inside = source + start + number, start + number < count
    gate = tokens * stride + head
    sums, strength = _sums(g, gate, inside), tl.load(beta + gate, mask=inside, other=0)
    channels = mixed + tokens[:, None] * DIM + (head // (V_HEADS // K_HEADS)) * K_DIM + key[None, :]
    used = inside[:, None] & (key < K_DIM)[None, :]
    k = load_unit_rows(channels + K_HEADS * K_DIM, used, 1)
    q = load_unit_rows(channels, used, 1) * scale
    row, column = number[:, None], number[None, :]
    # Filled before `exp`: from a later token to an earlier one it would overflow.
    between = tl.exp(tl.where(row >= column, (sums[:, None] - sums[None, :]).to(tl.float32), float("-inf")))
    turned = tl.trans(k)
    place = (chunk * V_HEADS + head) * (CHUNK * CHUNK) + row * CHUNK + column
    tl.store(scores + place, _product(q, turned) * between)
    system = tl.where(row > column, _product(k, turned) * between * strength[:, None], 0.0)
    inverse = tl.where(row == column, 1.0, 0.0)
    for level in tl.static_range(LEVELS):
        block_row, block_column = row >> level, column >> level
        below = (block_row > block_column) & (block_row >> 1 == block_column >> 1)
        part = tl.where(below, system, 0.0)
        inverse -= _product(_product(inverse, part), inverse)
    tl.store(inverses + place, inverse)


@jit()
def _scan_kernel(
    mixed: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    stride: tl.tensor,
    inverses: tl.tensor,
    scores: tl.tensor,
    states: tl.tensor,
    out: tl.tensor,
    records: tl.tensor,
    scale: tl.tensor,
    most: tl.tensor,
    WIDTH: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    WRITE: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, fresh, source, _target, count = read_record(records, request, False, 0, WIDTH)
    if count <= most:
        return
    number, key = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    key_inside, value_inside = key < K_DIM, column < V_DIM
    held = states + (slot * V_HEADS + head) * (K_DIM * V_DIM) + key[:, None] * V_DIM + column[None, :]
    state_inside = key_inside[:, None] & value_inside[None, :]
    begun = key < tl.where(fresh == 0, K_DIM, 0)
    state = tl.load(held, mask=begun[:, None] & value_inside[None, :], other=0)
    key_head = head // (V_HEADS // K_HEADS)
    DIM: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    square = (first_chunk(records, request, WIDTH) * V_HEADS + head) * (CHUNK * CHUNK)
    square += number[:, None] * CHUNK + number[None, :]
    for start in range(0, count, CHUNK):
        tokens, inside = source + start + number, start + number < count
        gate = tokens * stride + head
        sums, strength = _sums(g, gate, inside), tl.load(beta + gate, mask=inside, other=0)
        last = tl.min(sums, 0)  # decays are not positive
        decay, left = tl.exp(sums.to(tl.float32)), tl.exp((last - sums).to(tl.float32))
        channels = mixed + tokens[:, None] * DIM
        used, written = inside[:, None] & key_inside[None, :], inside[:, None] & value_inside[None, :]
        k = load_unit_rows(channels + (K_HEADS + key_head) * K_DIM + key[None, :], used, 1)
        q = load_unit_rows(channels + key_head * K_DIM + key[None, :], used, 1) * (decay * scale)[:, None]
        v = tl.load(channels + 2 * K_HEADS * K_DIM + head * V_DIM + column[None, :], mask=written, other=0)
        missing = (v.to(tl.float32) - _product(k * decay[:, None], state)) * strength[:, None]
        values = _product(tl.load(inverses + square), missing)
        read = _product(q, state) + _product(tl.load(scores + square), values)
        tl.store(out + (tokens[:, None] * V_HEADS + head) * V_DIM + column[None, :], read, mask=written)
        state = state * tl.exp(last.to(tl.float32)) + _product(tl.trans(k * left[:, None]), values)
        square += V_HEADS * CHUNK * CHUNK
    if WRITE:
        tl.store(held, state, mask=state_inside)


def scan_chunks(
    mixed: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    out: Tensor,
    records: Tensor,
    chunks: Tensor,
    shape: GatedDeltaShape,
    *,
    chunk: int,
    most: int,
    write: bool,
) -> None:
    """Run the requests with more than `most` tokens; see `recur`.

    Args:
        chunks: `[N, 2]` int64, request and first token of every chunk; those of a request lie one after another.
        chunk: tokens of a chunk, a power of two and at least 16.
    """
    requests, count = records.shape[0], chunks.shape[0]
    inverses, scores = (
        undefined(count, shape.num_v_heads, chunk, chunk, dtype=states.dtype, device=states.device) for _ in range(2)
    )
    sizes = {"WIDTH": records.shape[1], "K_HEADS": shape.num_k_heads, "V_HEADS": shape.num_v_heads}
    sizes |= {"K_DIM": shape.k_dim, "CHUNK": chunk, "KEYS": power_of_2(shape.k_dim, _SMALLEST)}
    scale = shape.k_dim**-0.5
    _prepare_kernel[count, shape.num_v_heads](
        *(mixed, g, beta, g.stride(0), inverses, scores, records, chunks, scale, most),
        DIM=shape.conv_dim,
        LEVELS=chunk.bit_length() - 1,
        **sizes,
    )
    columns = power_of_2(shape.v_dim, _SMALLEST)
    columns = columns if INTERPRETED else min(columns, _COLUMNS)
    _scan_kernel[requests, shape.num_v_heads, cdiv(shape.v_dim, columns)](
        *(mixed, g, beta, g.stride(0), inverses, scores, states, out, records, scale, most),
        V_DIM=shape.v_dim,
        WRITE=write,
        COLUMNS=columns,
        num_stages=1,
        **sizes,
    )
