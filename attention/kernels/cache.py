"""Writing keys and values to their slots."""

import triton.language as tl
from torch import Tensor

from attention.kv_cache import PagedKVCache
from ubatch.kernels import rows_contiguous
from ubatch.kernels.triton_jit import cdiv, jit, power_of_2, to_fp8

_MAX_BLOCK = 1024  # most elements that one program moves


@jit()
def quantize(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """`x / scale` as bytes of float8e4nv, saturated."""
    return to_fp8(tl.div_rn(x.to(tl.float32), scale)).to(tl.uint8, bitcast=True)


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
    V_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, v_inside = place < ROW, place < V_ROW
    head, dim = place // HEAD_DIM, place % HEAD_DIM
    v_head, v_dim = place // V_DIM, place % V_DIM
    key = tl.load(k + token * k_stride_token + head * k_stride_head + dim, mask=inside)
    value = tl.load(v + token * v_stride_token + v_head * v_stride_head + v_dim, mask=v_inside)
    if FP8:
        key, value = quantize(key, k_scale), quantize(value, v_scale)
    tl.store(keys + slot * ROW + place, key, mask=inside)
    tl.store(values + slot * V_ROW + place, value, mask=v_inside)


def write_kv(cache: PagedKVCache, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store new keys and values, quantised with the layer's scales if the cache is fp8.

    Args:
        k: `[T, num_kv_heads, head_dim]`.
        v: `[T, num_kv_heads, value_dim]`.
        slots: `[T]` int64, each real slot at most once; a negative one is not written.
    """
    if not slots.shape[0]:
        return
    k, v = rows_contiguous(k), rows_contiguous(v)
    spec = cache.spec
    row, v_row = (spec.num_kv_heads * dim for dim in (spec.head_dim, spec.value_dim))
    longest = max(row, v_row)
    block = min(power_of_2(longest), _MAX_BLOCK)
    _write_kernel[slots.shape[0], cdiv(longest, block)](
        *(k, k.stride(0), k.stride(1)),
        *(v, v.stride(0), v.stride(1)),
        *(cache.keys(layer), cache.values(layer), slots),
        *cache.scales(layer),
        ROW=row,
        V_ROW=v_row,
        HEAD_DIM=spec.head_dim,
        V_DIM=spec.value_dim,
        FP8=spec.fp8,
        BLOCK=block,
    )
