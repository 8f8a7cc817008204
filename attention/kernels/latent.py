"""Multi-head latent attention over the paged latents: the kernels for decoding.

    write     program (token): writes its latent and its rotated key part side by side into the cache
    split     program (rows, request, split): queries against a part of the request's latents

With absorbed queries this is attention with one key head of `kv_lora_rank + rope` elements, whose first `kv_lora_rank`
elements are also its value. Rows are queries times heads: row m is query m // H, head m % H. Queries are rotated when
they are loaded. The splits' results are reduced as in `attention.kernels.decode`.

Tiles of 64 or more rows read latents once, for keys and values. Smaller tiles multiply from registers, and there Triton
keeps several loads in flight only if a single product uses them; so values are read again, from the L2 cache.

Source: DeepSeek-V2 (2024), section 2.1.2; Flash-Decoding (Dao et al., 2023).
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from attention.interface import AttentionShape, MLAShape, RopeTable
from attention.kernels.cache import quantize
from attention.kernels.decode import DecodeSplits, reduce_splits
from attention.kernels.tile import BATCH_ARGUMENTS, LOG2_E, PagedBatch, load_fp8, store_rows
from attention.kv_cache import MLAKVCache
from ubatch.kernels import rows_contiguous
from ubatch.kernels.triton_jit import INTERPRETED, cdiv, jit, power_of_2

_SHARED_ROWS = 64  # from this many rows on, products read from shared memory


def as_attention(shape: MLAShape) -> AttentionShape:
    """The shape of absorbed attention for `DecodeSplits`: one key head, and outputs as wide as a latent."""
    return AttentionShape(shape.num_heads, 1, shape.kv_lora_rank, shape.softmax_scale)


@dataclass(frozen=True)
class LatentTile:
    """The tile that one program holds at once.

    Attributes:
        rows: queries times heads, a power of two.
        keys: latents per iteration of the loop.
        num_stages: iterations of the loop whose loads are in flight.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    @classmethod
    def default(cls, shape: MLAShape, max_queries: int, dtype: torch.dtype, *, fp8: bool) -> "LatentTile":
        """A tile that fits an H200. Over an fp8 cache, what converts 64 rows' latents does not fit the registers."""
        rows = power_of_2(max_queries * shape.num_heads, 16)
        if INTERPRETED or dtype == torch.float32:
            return cls(min(rows, 16), 16, 4, 1)
        if rows < _SHARED_ROWS:
            return cls(16, 32, 8, 3)
        return cls(32 if fp8 else 64, 32, 8, 3)

    def blocks(self, shape: MLAShape, max_queries: int) -> int:
        """Programs per request and split."""
        return cdiv(max_queries * shape.num_heads, self.rows)


@jit()
def _rotated(
    row: tl.tensor,
    inside: tl.tensor,
    angles: tl.tensor,
    dims: tl.tensor,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> Any:
    """Rotate one row in float32. `row + dims` points to its elements, `angles` to a row of the cosine/sine table."""
    HALF: tl.constexpr = ROPE // 2
    if INTERLEAVED:
        angle, partner = dims // 2, dims ^ 1
        is_first = dims % 2 == 0
    else:
        angle, partner = dims % HALF, (dims + HALF) % ROPE
        is_first = dims < HALF
    is_dim = dims < ROPE
    cos = tl.load(angles + angle, mask=is_dim & inside, other=0).to(tl.float32)
    sin = tl.load(angles + HALF + angle, mask=is_dim & inside, other=0).to(tl.float32)
    x = tl.load(row + dims, mask=is_dim & inside, other=0).to(tl.float32)
    other = tl.load(row + partner, mask=is_dim & inside, other=0).to(tl.float32)
    return x * cos + tl.where(is_first, -other, other) * sin


@jit("slots", "positions")
def _write_latent_kernel(
    memory: tl.tensor,
    latent: tl.tensor,
    latent_stride: tl.tensor,
    k_rope: tl.tensor,
    rope_stride: tl.tensor,
    cos_sin: tl.tensor,
    angle_stride: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    scale: tl.tensor,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    place, dims = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    row = tl.load(latent + token * latent_stride + place, mask=place < RANK, other=0)
    angles = cos_sin + tl.load(positions + token) * angle_stride
    rotated = _rotated(k_rope + token * rope_stride, dims < ROPE, angles, dims, ROPE, INTERLEAVED)
    rotated = rotated.to(k_rope.dtype.element_ty)
    if FP8:
        row, rotated = quantize(row, scale), quantize(rotated, scale)
    target = memory + slot * (RANK + ROPE)
    tl.store(target + place, row, mask=place < RANK)
    tl.store(target + RANK + dims, rotated, mask=dims < ROPE)


def write_latent(cache: MLAKVCache, layer: int, latent: Tensor, k_rope: Tensor, rope: RopeTable, slots: Tensor) -> None:
    """Rotate and store new tokens, quantised with the layer's scale if the cache is fp8.

    The torch reference is `cache.write(layer, latent, rope.rotate(k_rope), slots)`.

    Args:
        latent: `[T, kv_lora_rank]`, normalised.
        k_rope: `[T, qk_rope_head_dim]`, not yet rotated.
        slots: `[T]` int64, each real slot at most once; a negative one is not written.
    """
    if not slots.shape[0]:
        return
    latent, k_rope = rows_contiguous(latent), rows_contiguous(k_rope)
    spec = cache.spec
    _write_latent_kernel[slots.shape[0],](
        cache.pool.memory[layer],
        *(latent, latent.stride(0), k_rope, k_rope.stride(0)),
        *(rope.cos_sin, rope.cos_sin.stride(0), rope.positions),
        *(slots, cache.scale(layer)),
        RANK=spec.kv_lora_rank,
        ROPE=spec.qk_rope_head_dim,
        INTERLEAVED=rope.interleaved,
        FP8=spec.fp8,
        BLOCK_L=power_of_2(spec.kv_lora_rank),
        BLOCK_R=power_of_2(spec.qk_rope_head_dim),
    )


@dataclass(frozen=True)
class LatentConstants:
    """All that the kernel over latents is compiled for, in one argument.

    Attributes:
        rows, keys: of the tile.
        page: tokens of a block.
        fp8: whether the cache is.
        interleaved: see `RopeTable`.
        upcast: whether queries are multiplied in float32.
    """

    shape: MLAShape
    rows: int
    keys: int
    page: int
    fp8: bool
    max_queries: int
    interleaved: bool
    upcast: bool = INTERPRETED

    @property
    def read_twice(self) -> bool:
        """Whether latents are loaded again as values."""
        return self.rows < _SHARED_ROWS

    @property
    def ranks(self) -> int:
        """Elements of a latent, padded to a power of two."""
        return power_of_2(self.shape.kv_lora_rank, 16)

    @property
    def ropes(self) -> int:
        """Elements of a rotated part, padded to a power of two."""
        return power_of_2(self.shape.qk_rope_head_dim, 16)


@jit(*BATCH_ARGUMENTS, "num_splits", "positions")
def _latent_split_kernel(
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    q: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    q_rope: tl.tensor,
    rope_stride_token: tl.tensor,
    rope_stride_head: tl.tensor,
    cos_sin: tl.tensor,
    angle_stride: tl.tensor,
    positions: tl.tensor,
    latents: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_table: tl.tensor,
    table_stride: tl.tensor,
    mask: tl.tensor,
    mask_offsets: tl.tensor,
    draft_positions: tl.tensor,
    score_scale: tl.tensor,
    value_scale: tl.tensor,
    num_splits: tl.tensor,
    C: tl.constexpr,
) -> None:
    first_row, request, split = tl.program_id(0) * C.rows, tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start_loc + request)
    num_queries = tl.load(query_start_loc + request + 1) - start
    if (num_queries == 0) | (num_queries > C.max_queries) | (first_row >= num_queries * C.shape.num_heads):
        return
    seq_len = tl.load(seq_lens + request)

    rows = first_row + tl.arange(0, C.rows)
    is_row = rows < num_queries * C.shape.num_heads
    query, head = tl.where(is_row, rows // C.shape.num_heads, 0), rows % C.shape.num_heads
    token = (start + query).to(tl.int64)
    places_l, places_r = tl.arange(0, C.ranks), tl.arange(0, C.ropes)
    is_l, is_r = places_l < C.shape.kv_lora_rank, places_r < C.shape.qk_rope_head_dim
    of_row = q + (token * q_stride_token + head.to(tl.int64) * q_stride_head)[:, None]
    q_l = tl.load(of_row + places_l[None, :], mask=is_row[:, None] & is_l[None, :], other=0)
    angles = cos_sin + (tl.load(positions + token, mask=is_row, other=0) * angle_stride)[:, None]
    of_row = q_rope + (token * rope_stride_token + head * rope_stride_head)[:, None]
    q_r = _rotated(of_row, is_row[:, None], angles, places_r[None, :], C.shape.qk_rope_head_dim, C.interleaved)
    if C.upcast:
        q_l = q_l.to(tl.float32)
    else:
        q_r = q_r.to(q_l.dtype)

    query_positions = seq_len - num_queries + query
    mask_rows = query
    if mask is not None:
        mask_rows = mask + tl.load(mask_offsets + request) + query.to(tl.int64) * seq_len
    table = block_table + request.to(tl.int64) * table_stride
    keys_per_split = tl.cdiv(tl.cdiv(seq_len, num_splits), C.keys) * C.keys
    first = split * keys_per_split
    last = tl.minimum(first + keys_per_split, seq_len)

    highest = tl.full([C.rows], float("-inf"), tl.float32)
    weight_sum = tl.full([C.rows], 0, tl.float32)
    total = tl.full([C.rows, C.ranks], 0, tl.float32)
    following = first + tl.arange(0, C.keys)  # block numbers are loaded one iteration ahead, as in `tile.attend_keys`
    blocks = tl.load(table + following // C.page, mask=following < last, other=0)
    for turn in range(first, last, C.keys):
        places = turn + tl.arange(0, C.keys)
        is_key = places < last
        row = latents + blocks.to(tl.int64) * stride_block + (places % C.page) * stride_slot
        following = places + C.keys
        blocks = tl.load(table + following // C.page, mask=following < last, other=0)

        k_l = tl.load(row[None, :] + places_l[:, None], mask=is_key[None, :] & is_l[:, None], other=0)
        k_r = tl.load(
            row[None, :] + C.shape.kv_lora_rank + places_r[:, None], mask=is_key[None, :] & is_r[:, None], other=0
        )
        if C.fp8:
            k_l, k_r = load_fp8(k_l), load_fp8(k_r)
        k_l, k_r = k_l.to(q_l.dtype), k_r.to(q_l.dtype)
        scores = tl.dot(q_l, k_l, input_precision="ieee")
        scores += tl.dot(q_r, k_r, input_precision="ieee")
        scores *= score_scale * LOG2_E
        if mask is not None:
            seen = tl.load(mask_rows[:, None] + places[None, :], mask=is_key[None, :], other=0) != 0
        else:
            seen = is_key[None, :] & (places[None, :] <= query_positions[:, None])
        scores = tl.where(seen, scores, float("-inf"))

        higher = tl.maximum(highest, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is nan
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(highest - shift)
        weight_sum = weight_sum * fade + tl.sum(weights, 1)
        if C.read_twice:
            v = tl.load(row[:, None] + places_l[None, :], mask=is_key[:, None] & is_l[None, :], other=0)
            if C.fp8:
                v = load_fp8(v)
            v = v.to(q_l.dtype)
        else:
            v = tl.trans(k_l)
        total = total * fade[:, None] + tl.dot(weights.to(q_l.dtype), v, input_precision="ieee")
        highest = higher

    store_rows(
        out,
        None,
        partial_out,
        partial_lse,
        total,
        highest,
        weight_sum,
        start,
        request,
        query,
        head,
        is_row,
        num_splits,
        value_scale,
        C.shape.num_heads,
        C.max_queries,
        C.shape.kv_lora_rank,
        C.ranks,
    )


def latent_decode(
    q: Tensor,
    q_rope: Tensor,
    rope: RopeTable,
    out: Tensor,
    shape: MLAShape,
    cache: MLAKVCache,
    layer: int,
    batch: PagedBatch,
    splits: DecodeSplits,
    tile: LatentTile,
    workspace: Tensor,
) -> None:
    """Attend for every request that has 1 to `splits.max_queries` queries; other requests' rows are not written.

    Args:
        q: `[T, num_heads, kv_lora_rank]`, absorbed.
        q_rope: `[T, num_heads, qk_rope_head_dim]`, not yet rotated.
        out: `[T, num_heads, kv_lora_rank]`, contiguous; attended latents are written to it.
        cache: read; it holds the step's latents already.
        workspace: float32, at least `splits.workspace_numbers(as_attention(shape), ...)`; overwritten.
    """
    if not batch.num_reqs:
        return
    q, q_rope = rows_contiguous(q), rows_contiguous(q_rope)
    latents, scale, stored = cache.rows(layer), cache.scale(layer), (cache.spec.block_size, cache.spec.fp8)
    partials = splits.partials(as_attention(shape), batch.num_reqs, workspace)
    _latent_split_kernel[tile.blocks(shape, splits.max_queries), batch.num_reqs, splits.num_splits](
        out=out,
        partial_out=partials[0],
        partial_lse=partials[1],
        q=q,
        q_stride_token=q.stride(0),
        q_stride_head=q.stride(1),
        q_rope=q_rope,
        rope_stride_token=q_rope.stride(0),
        rope_stride_head=q_rope.stride(1),
        cos_sin=rope.cos_sin,
        angle_stride=rope.cos_sin.stride(0),
        positions=rope.positions,
        latents=latents,
        stride_block=latents.stride(0),
        stride_slot=latents.stride(1),
        score_scale=shape.softmax_scale * scale,
        value_scale=scale,
        num_splits=splits.num_splits,
        C=LatentConstants(shape, tile.rows, tile.keys, *stored, splits.max_queries, rope.interleaved),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **batch.arguments(),
    )
    reduce_splits(out, partials, batch, splits)
