"""The gated delta rule for prompts, in chunks; see `attention.linear.delta_rule` for the equations.

    prepare   for every chunk and head, without states: `prepare_chunks`
    scan      for every request, head and block of columns: its chunks one after another, the state in registers

Requests with few tokens are left to `recur`.

Products with bfloat16 queries and keys take states and values in two bfloat16 parts, which hold 16 bits. They are as
fast as TF32 and closer, and tensor cores read queries and keys from shared memory as they are. All other products are
as `precision` says.

On a GPU several ways to run prompts are timed (`tune_scan`), on a batch of 4,096 random tokens, in one prompt or in
several: one prompt needs its state in many parts, and several do not, so that a chunk is read fewer times. States are
not written. Where nothing can be timed, the first choice is used.
"""

from dataclasses import dataclass
from functools import cache, partial

import torch
import triton.language as tl
from torch import Tensor

from attention.linear.kernels.prepare import SMALLEST, precision, prepare_chunks, product
from attention.linear.kernels.records import first_chunk, read_record
from attention.linear.plan import CHUNK
from attention.linear.states import GatedDeltaShape
from ubatch.kernels import autotune
from ubatch.kernels.triton_jit import INTERPRETED, cdiv, jit, power_of_2


@dataclass(frozen=True)
class ScanChoice:
    """One way to run prompts.

    Attributes:
        columns: of a state, in a program of `scan`, a power of two and at least 16. Fewer make more programs.
        num_warps, num_stages: of a program of `scan`; with two stages the next chunk is read during this one.
        prepare_warps: of a program of `prepare`.
    """

    columns: int
    num_warps: int
    num_stages: int
    prepare_warps: int = 4


@jit()
def _times(a: tl.tensor, x: tl.tensor, PRECISION: tl.constexpr, UPCAST: tl.constexpr) -> tl.tensor:
    """`a x` of queries or keys as they are stored, and float32 numbers."""
    if a.dtype == tl.bfloat16:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        if UPCAST:
            a, high, low = a.to(tl.float32), high.to(tl.float32), low.to(tl.float32)
        result = tl.dot(a, low, tl.dot(a, high))
    else:
        result = product(a.to(tl.float32), x, PRECISION)
    return result


@jit()
def _scan_kernel(
    mixed: tl.tensor,
    inverses: tl.tensor,
    scores: tl.tensor,
    factors: tl.tensor,
    states: tl.tensor,
    out: tl.tensor,
    records: tl.tensor,
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
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, fresh, source, _target, count = read_record(records, request, False, 0, WIDTH)
    if count <= most:
        return
    number, key = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    key_inside, value_inside = key < K_DIM, column < V_DIM
    place = states + (slot * V_HEADS + head) * (K_DIM * V_DIM) + key[:, None] * V_DIM + column[None, :]
    begun = key < tl.where(fresh == 0, K_DIM, 0)
    state = tl.load(place, mask=begun[:, None] & value_inside[None, :], other=0)
    key_head = head // (V_HEADS // K_HEADS)
    DIM: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    own = first_chunk(records, request, WIDTH) * V_HEADS + head
    for start in range(0, count, CHUNK):
        tokens, inside = source + start + number, start + number < count
        used, written = inside[:, None] & key_inside[None, :], inside[:, None] & value_inside[None, :]
        channels = mixed + tokens[:, None] * DIM
        factor = factors + own * (4 * CHUNK) + number
        square = own * (CHUNK * CHUNK) + number[:, None] * CHUNK + number[None, :]
        k = tl.load(channels + (K_HEADS + key_head) * K_DIM + key[None, :], mask=used, other=0)
        held = _times(k, state, PRECISION, UPCAST) * tl.load(factor + CHUNK)[:, None]
        v = tl.load(channels + 2 * K_HEADS * K_DIM + head * V_DIM + column[None, :], mask=written, other=0)
        values = product(tl.load(inverses + square), v.to(tl.float32) - held, PRECISION)
        q = tl.load(channels + key_head * K_DIM + key[None, :], mask=used, other=0)
        read = _times(q, state, PRECISION, UPCAST) * tl.load(factor + 2 * CHUNK)[:, None]
        read += product(tl.load(scores + square), values, PRECISION)
        tl.store(out + (tokens[:, None] * V_HEADS + head) * V_DIM + column[None, :], read, mask=written)
        state *= tl.load(factors + own * (4 * CHUNK) + CHUNK - 1)  # the decay of the whole chunk
        state += _times(tl.trans(k), values * tl.load(factor + 3 * CHUNK)[:, None], PRECISION, UPCAST)
        own += V_HEADS
    if WRITE:
        tl.store(place, state, mask=key_inside[:, None] & value_inside[None, :])


def scan_chunks(
    mixed: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    out: Tensor,
    records: Tensor,
    chunks: Tensor,
    choice: ScanChoice,
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
    prepared = prepare_chunks(
        *(mixed, g, beta, records, chunks, shape), chunk=chunk, most=most, num_warps=choice.prepare_warps
    )
    _scan_kernel[records.shape[0], shape.num_v_heads, cdiv(shape.v_dim, choice.columns)](
        *(mixed, *prepared, states, out, records, most),
        WIDTH=records.shape[1],
        K_HEADS=shape.num_k_heads,
        V_HEADS=shape.num_v_heads,
        K_DIM=shape.k_dim,
        V_DIM=shape.v_dim,
        CHUNK=chunk,
        WRITE=write,
        KEYS=power_of_2(shape.k_dim, SMALLEST),
        COLUMNS=choice.columns,
        PRECISION=precision(mixed.dtype),
        UPCAST=INTERPRETED,
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
    )


_TOKENS, _MANY = 4096, 8
_Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@cache
def scan_choices(shape: GatedDeltaShape, dtype: torch.dtype) -> tuple[ScanChoice, ...]:
    """The choices that are timed for activations of this dtype; the default first.

    None of bfloat16 has one stage: by Triton 3.6, chunks of 64 then gave wrong numbers or illegal memory accesses on an
    H200, with 16 and with 32 columns.
    """
    most = power_of_2(shape.v_dim, SMALLEST)
    if INTERPRETED:
        return (ScanChoice(most, 4, 1),)
    if dtype != torch.bfloat16:
        return (ScanChoice(min(most, 32), 4, 1),)
    tried = [
        ScanChoice(min(most, columns), num_warps, 2, prepare_warps)
        for prepare_warps in (4, 8)
        for columns, num_warps in ((32, 4), (32, 8), (64, 8))
    ]
    return tuple(dict.fromkeys(tried))


def tune_scan(shape: GatedDeltaShape, dtype: torch.dtype, chunk: int, device: torch.device) -> ScanChoice:
    """The fastest way to run prompts, on average over one prompt and several. Chunks of short prompts are not timed.

    Args:
        dtype: of activations.
        chunk: tokens of a chunk.
    """
    choices = scan_choices(shape, dtype)
    if chunk < CHUNK:
        return choices[0]
    made: dict[int, _Batch] = {}

    def run(choice: ScanChoice, prompts: int = 1) -> Tensor:
        if prompts not in made:  # allocated only if something is measured
            made[prompts] = _random_batch(shape, dtype, prompts, chunk, device)
        mixed, g, beta, states, records, chunks = made[prompts]
        out = torch.empty(_TOKENS, shape.num_v_heads, shape.v_dim, device=device)
        inputs = mixed, g, beta, states, out, records, chunks
        scan_chunks(*inputs, choice, shape, chunk=chunk, most=0, write=False)
        return out

    heads = f"{shape.num_k_heads} / {shape.num_v_heads} heads of {shape.k_dim} and {shape.v_dim}"
    key = f"linear attention, {heads}, {dtype}, chunks of {chunk}"
    return autotune(key, choices, run, device=device, answer=run, also=[partial(run, prompts=_MANY)])


def _random_batch(shape: GatedDeltaShape, dtype: torch.dtype, prompts: int, chunk: int, device: torch.device) -> _Batch:
    """Inputs, gates, states, records and chunks of equally long prompts."""
    random, each = torch.Generator(device).manual_seed(0), _TOKENS // prompts
    mixed = torch.randn(_TOKENS, shape.conv_dim, dtype=dtype, device=device, generator=random)
    g, beta = torch.rand(2, _TOKENS, shape.num_v_heads, device=device, generator=random)
    states = torch.zeros(prompts, shape.num_v_heads, shape.k_dim, shape.v_dim, device=device)
    records = [[slot, 1, slot * each, each, 0, slot * each // chunk] for slot in range(prompts)]
    chunks = [[slot, start] for slot in range(prompts) for start in range(0, each, chunk)]
    return mixed, -g, beta, states, torch.tensor(records, device=device), torch.tensor(chunks, device=device)
