"""Writing keys and values to their slots, and reading the page table out of the request-to-token table."""

import triton.language as tl
from torch import Tensor

from attention.kv_cache import PagedKVCache
from ubatch.triton_jit import cdiv, jit, power_of_2, rows_contiguous, to_fp8

__all__ = ["quantize", "read_page_table", "write_kv"]

_MAX_BLOCK = 1024  # numbers that one program moves


@jit()
def quantize(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """`x / scale` as bytes of float8e4nv, saturated."""
    return to_fp8(x.to(tl.float32) / scale).to(tl.uint8, bitcast=True)


@jit("slots")
def _write_kernel(
    k: tl.tensor,
    k_stride_token: tl.tensor,
    k_stride_head: tl.tensor,
    v: tl.tensor,
    v_stride_token: tl.tensor,
    v_stride_head: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < ROW
    head, dim = place // HEAD_DIM, place % HEAD_DIM
    key = tl.load(k + token * k_stride_token + head * k_stride_head + dim, mask=inside)
    value = tl.load(v + token * v_stride_token + head * v_stride_head + dim, mask=inside)
    if FP8:
        key, value = quantize(key, k_scale), quantize(value, v_scale)
    tl.store(keys + slot * ROW + place, key, mask=inside)
    tl.store(values + slot * ROW + place, value, mask=inside)


@jit("source_stride", "table_stride", "num_pages", "rows", "seq_lens")
def _page_table_kernel(
    table: tl.tensor,
    table_stride: tl.tensor,
    num_pages: tl.tensor,
    slots: tl.tensor,
    source_stride: tl.tensor,
    rows: tl.tensor,
    seq_lens: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    owned = page * PAGE < tl.load(seq_lens + request)
    row = slots + tl.load(rows + request).to(tl.int64) * source_stride
    first_slot = tl.load(row + page * PAGE, mask=owned, other=0)
    target = table + request.to(tl.int64) * table_stride + page
    tl.store(target, first_slot // PAGE, mask=page < num_pages)


def write_kv(cache: PagedKVCache, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store new keys and values, quantised with the layer's scales if the cache is fp8.

    Args:
        cache: written.
        layer: which layer's cache.
        k: `[T, num_kv_heads, head_dim]`.
        v: the same shape.
        slots: `[T]` int64, each real slot at most once; a negative one is not written.
    """
    if not slots.shape[0]:
        return
    k, v = rows_contiguous(k), rows_contiguous(v)
    spec = cache.spec
    row = spec.num_kv_heads * spec.head_dim
    block = min(power_of_2(row), _MAX_BLOCK)
    k_scale, v_scale = cache.scales(layer)
    _write_kernel[slots.shape[0], cdiv(row, block)](
        k,
        k.stride(0),
        k.stride(1),
        v,
        v.stride(0),
        v.stride(1),
        cache.keys(layer),
        cache.values(layer),
        slots,
        k_scale,
        v_scale,
        ROW=row,
        HEAD_DIM=spec.head_dim,
        FP8=spec.fp8,
        BLOCK=block,
    )


def read_page_table(table: Tensor, slots: Tensor, rows: Tensor, seq_lens: Tensor, block_size: int) -> None:
    """Every `block_size`-th slot of a request, divided by `block_size`, is a block: the table read with a stride.

    Args:
        table: `[R, num_pages]` int32, dense rows, written; 0 past a request's length.
        slots: `[max_num_reqs, max_tokens]` int32, dense rows: the slot of every token of every request.
        rows: `[R]` integer, which row of `slots` is each request's.
        seq_lens: `[R]` integer, tokens of each request.
        block_size: tokens per block.

    Source: the page-strided table of SGLang's TensorRT-LLM back ends.
    """
    num_reqs, num_pages = table.shape
    if not table.numel():
        return
    block = min(power_of_2(num_pages), _MAX_BLOCK)
    _page_table_kernel[num_reqs, cdiv(num_pages, block)](
        table,
        table.stride(0),
        num_pages,
        slots,
        slots.stride(0),
        rows,
        seq_lens,
        PAGE=block_size,
        BLOCK=block,
    )
