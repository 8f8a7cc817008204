"""The inner loop of every attention kernel: a tile of queries against a range of one request's keys.

A tile's rows are the query heads that share a key/value head, of one query or of several:

    row m    query m // GROUP of the tile, head m % GROUP of the group

so keys and values are read once for the whole group, and a decode step still has a matrix to multiply. Keys are found
through the block table, one block number per key, loaded one iteration ahead: a load whose address is the result of
another load would keep Triton from having several tiles in flight. Scores are scaled for base-2 exponentials, because
the hardware computes exp2.

Source: FlashAttention-2 (Dao, 2023); paged keys: PagedAttention (Kwon et al., 2023).
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from attention.interface import AttentionShape
from attention.kv_cache import PagedKVCache
from ubatch import ConfigError
from ubatch.kernels.triton_jit import INTERPRETED, constant, jit, power_of_2

LOG2_E = constant(1.4426950408889634)
BATCH_ARGUMENTS = (
    "query_start_loc",
    "seq_lens",
    "block_table",
    "table_stride",
    "mask",
    "mask_offsets",
    "draft_positions",
)
"""Kernel arguments that come from a `PagedBatch`: views of the whole batch in a lane, and different in every step."""


@dataclass(frozen=True)
class TreeMask:
    """Which tokens each draft of a verify batch sees; the layout is that of `attention.metadata`.

    Attributes:
        mask: flat uint8, not 0 where a draft sees a token.
        offsets: `[R]` int64, where each request's part starts.
        positions: `[T]` int64, each draft's position in its request, for the sliding window.
    """

    mask: Tensor
    offsets: Tensor
    positions: Tensor


@dataclass(frozen=True)
class PagedBatch:
    """A step's batch in the form that kernels read.

    Attributes:
        num_reqs: `R`.
        query_start_loc: `[R + 1]` int32 or longer.
        seq_lens: `[R]` int32 or longer.
        block_table: `[R, blocks]` int32 or longer.
        tree: mask of a verify batch with a custom mask; None is causal.
    """

    num_reqs: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    tree: TreeMask | None = None

    def arguments(self) -> dict[str, Any]:
        """The kernel arguments that describe the batch."""
        tree = self.tree
        return {
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "block_table": self.block_table,
            "table_stride": self.block_table.stride(0),
            "mask": None if tree is None else tree.mask,
            "mask_offsets": None if tree is None else tree.offsets,
            "draft_positions": None if tree is None else tree.positions,
        }


_PLAIN_KEYS = 16
"""Keys of a tile that does not run on tensor cores: in float32, where larger tiles do not fit the registers, and in the
interpreter, where small tiles let small tests have several."""


@dataclass(frozen=True)
class TileSize:
    """The tile that one program holds at once; `decode` and `prefill` return sizes that fit an H200.

    Attributes:
        rows: queries times heads of a group, a power of two.
        keys: keys per iteration of the loop.
        dims: elements of a head, padded to a power of two.
        num_stages: iterations of the loop whose loads are in flight.
    """

    rows: int
    keys: int
    dims: int
    num_warps: int
    num_stages: int

    @classmethod
    def decode(cls, shape: AttentionShape, max_queries: int, dtype: torch.dtype) -> "TileSize":
        """A tile that holds all rows of one request with `max_queries` queries."""
        rows, dims = power_of_2(max_queries * shape.group_size, 16), power_of_2(shape.head_dim, 16)
        if INTERPRETED or dtype == torch.float32:
            return cls(rows, _PLAIN_KEYS, dims, 4, 1)
        return cls(rows, 32 if dims > 128 else 64, dims, 4 if rows <= 64 else 8, 3)

    @classmethod
    def prefill(cls, shape: AttentionShape, dtype: torch.dtype) -> "TileSize":
        """A tile for prompts, with as many queries as fit."""
        group, dims = power_of_2(shape.group_size, 16), power_of_2(shape.head_dim, 16)
        if INTERPRETED or dtype == torch.float32:
            return cls(group, _PLAIN_KEYS, dims, 4, 1)
        if dims > 128:
            return cls(max(group, 64), 32, dims, 4, 3)
        return cls(max(group, 128), 64, dims, 8, 3)

    def queries(self, shape: AttentionShape) -> int:
        """Queries that the tile holds; rows past the last whole query are idle."""
        return self.rows // shape.group_size


@dataclass(frozen=True, eq=False)
class KernelConstants:
    """All that the attention kernel is compiled for, in one argument. Triton reads its attributes when it compiles.

    `kernel_constants` makes one for the same values only once, so that launches compare it by identity.

    Attributes:
        page: tokens of a block.
        fp8: whether the cache is.
        max_queries: most queries of a request whose keys are split; 0 for tiles of prompts.
        upcast: whether queries are multiplied in float32.
    """

    shape: AttentionShape
    size: TileSize
    page: int
    fp8: bool
    max_queries: int
    upcast: bool = INTERPRETED

    @property
    def window(self) -> int:
        """Tokens that a query sees; 0 is all."""
        return self.shape.sliding_window or 0

    @property
    def soft_cap(self) -> float:
        """Of the scores; 0 is none."""
        return self.shape.soft_cap or 0.0

    @property
    def value_dims(self) -> int:
        """Elements of a value head, padded to a power of two."""
        return power_of_2(self.shape.value_dim, 16)


kernel_constants = cache(KernelConstants)


@dataclass(frozen=True)
class PagedLayer:
    """What a layer's queries attend to.

    Attributes:
        cache: read; it holds the step's keys and values already.
        layer: number of the layer in the cache.
        sinks: `[num_heads]` logits, one more term in each head's denominator.
    """

    shape: AttentionShape
    cache: PagedKVCache
    layer: int
    batch: PagedBatch
    sinks: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """The kernel arguments that describe it."""
        shape, cache, layer = self.shape, self.cache, self.layer
        keys, values = cache.keys(layer), cache.values(layer)
        alike = keys.stride() == values.stride() or shape.value_dim != shape.head_dim
        if not alike or keys.stride(-1) != 1 or values.stride(-1) != 1:
            raise ConfigError(
                f"the triton back end reads keys and values that are dense in the last dimension, of one layout if "
                f"heads have one size; the cache has strides {keys.stride()} and {values.stride()}."
            )
        k_scale, v_scale = cache.scales(layer)
        return {
            "keys": keys,
            "values": values,
            "score_scale": shape.softmax_scale * k_scale,
            "value_scale": v_scale,
            "stride_block": keys.stride(0),
            "stride_slot": keys.stride(1),
            "stride_head": keys.stride(2),
            "v_stride_block": values.stride(0),
            "v_stride_slot": values.stride(1),
            "v_stride_head": values.stride(2),
            "sinks": self.sinks,
            **self.batch.arguments(),
        }


@jit()
def load_fp8(bits: tl.tensor) -> tl.tensor:
    """Convert stored fp8 bytes to float32; the scale is not applied."""
    return bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@jit()
def attend_keys(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    query_positions: tl.tensor,
    mask_rows: tl.tensor,
    draft_positions: tl.tensor,
    prefix: tl.tensor,
    score_scale: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    v_stride_block: tl.tensor,
    v_stride_slot: tl.tensor,
    C: tl.constexpr,
) -> Any:
    """Online softmax of a tile over the keys `first` to `last` of its request.

    Args:
        q: `[rows, dims]`, in the type to multiply in; idle rows are 0.
        keys: the layer's keys of the tile's head.
        table: the request's row of the block table.
        first: index of the first key in the request.
        last: index of the last key plus one.
        query_positions: `[rows]`, the queries' positions in the request.
        mask_rows: `[rows]`, pointers to the queries' rows of the mask; None is causal.
        draft_positions: with a mask: pointer to the positions of the request's drafts.
        prefix: tokens of the request before its queries.
        score_scale: factor on the scores, the keys' scale included.
        C: `KernelConstants`.

    Returns:
        The sum of values weighted with 2 ** (score - highest), `[rows, value_dims]`; the highest score, scaled for base
        2, -inf where no key is seen; the sum of the weights.
    """
    dims = tl.arange(0, C.size.dims)
    is_dim = dims < C.shape.head_dim
    v_dims = tl.arange(0, C.value_dims)
    is_v_dim = v_dims < C.shape.value_dim
    highest = tl.full([C.size.rows], float("-inf"), tl.float32)
    weight_sum = tl.full([C.size.rows], 0, tl.float32)
    total = tl.full([C.size.rows, C.value_dims], 0, tl.float32)
    following = first + tl.arange(0, C.size.keys)
    blocks = tl.load(table + following // C.page, mask=following < last, other=0)
    for start in range(first, last, C.size.keys):
        places = start + tl.arange(0, C.size.keys)
        is_key = places < last
        row = blocks.to(tl.int64) * stride_block + (places % C.page) * stride_slot
        v_row = row
        if C.shape.value_dim != C.shape.head_dim:
            v_row = blocks.to(tl.int64) * v_stride_block + (places % C.page) * v_stride_slot
        following = places + C.size.keys
        blocks = tl.load(table + following // C.page, mask=following < last, other=0)

        k = tl.load(keys + row[None, :] + dims[:, None], mask=is_key[None, :] & is_dim[:, None], other=0)
        if C.fp8:
            k = load_fp8(k)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * score_scale
        if C.soft_cap > 0:
            # tanh computed with exp needs no library. An overflow is harmless: exp may be inf, and 1 / inf is 0.
            scores = C.soft_cap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / C.soft_cap)) + 1.0))
        scores *= LOG2_E

        if mask_rows is not None:
            seen = tl.load(mask_rows[:, None] + places[None, :], mask=is_key[None, :], other=0) != 0
            if C.window > 0:
                is_draft = is_key & (places >= prefix)
                drafted = tl.load(draft_positions + places - prefix, mask=is_draft, other=0).to(tl.int32)
                stands = tl.where(is_draft, drafted, places)
                seen = seen & (stands[None, :] > query_positions[:, None] - C.window)
        else:
            seen = is_key[None, :] & (places[None, :] <= query_positions[:, None])
            if C.window > 0:
                seen = seen & (places[None, :] > query_positions[:, None] - C.window)
        scores = tl.where(seen, scores, float("-inf"))

        higher = tl.maximum(highest, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is nan
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(highest - shift)
        weight_sum = weight_sum * fade + tl.sum(weights, 1)
        v = tl.load(values + v_row[:, None] + v_dims[None, :], mask=is_key[:, None] & is_v_dim[None, :], other=0)
        if C.fp8:
            v = load_fp8(v)
        total = total * fade[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        highest = higher
    return total, highest, weight_sum


@jit()
def store_rows(
    out: tl.tensor,
    sinks: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    total: tl.tensor,
    highest: tl.tensor,
    weight_sum: tl.tensor,
    start: tl.tensor,
    request: tl.tensor,
    query: tl.tensor,
    head: tl.tensor,
    is_row: tl.tensor,
    num_splits: tl.tensor,
    value_scale: tl.tensor,
    HEADS: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Normalise the result of `attend_keys`, and store it: at its place, or as that of a split, see `reduce_splits`.

    Args:
        out: `[tokens, HEADS, HEAD_DIM]`, dense.
        sinks: `[HEADS]`, or None.
        partial_out: `[requests, MAX_QUERIES, HEADS, splits, HEAD_DIM]`, dense; None if there is one split.
        partial_lse: `[requests, MAX_QUERIES, HEADS, splits]`, dense; base 2. The split is the program's third number.
        total: `[BLOCK_M, BLOCK_D]`, the weighted values from `attend_keys`.
        highest: `[BLOCK_M]`, the highest scores from it.
        weight_sum: `[BLOCK_M]`, the sums of the weights from it.
        start: the request's first token.
        query, head: `[BLOCK_M]`, which of the request's queries each row is, and its head, which selects its sink.
        is_row: `[BLOCK_M]`, true for rows that are stored.
        value_scale: factor on the values.
    """
    dims = tl.arange(0, BLOCK_D)
    inside = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    if partial_out is None:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=is_row, other=0).to(tl.float32) * LOG2_E
            higher = tl.maximum(highest, sink)
            fade = tl.exp2(highest - higher)
            total = total * fade[:, None]
            weight_sum = weight_sum * fade + tl.exp2(sink - higher)
        row = (start + query).to(tl.int64) * HEADS + head
        result = total * (value_scale / tl.where(weight_sum > 0, weight_sum, 1.0))[:, None]
        tl.store(out + row[:, None] * HEAD_DIM + dims[None, :], result, mask=inside)
    else:
        part = ((request * MAX_QUERIES + query).to(tl.int64) * HEADS + head) * num_splits + tl.program_id(2)
        saw_any = weight_sum > 0
        divisor = tl.where(saw_any, weight_sum, 1.0)
        result = total * (value_scale / divisor)[:, None]
        tl.store(partial_out + part[:, None] * HEAD_DIM + dims[None, :], result, mask=inside)
        tl.store(partial_lse + part, tl.where(saw_any, highest + tl.log2(divisor), float("-inf")), mask=is_row)
