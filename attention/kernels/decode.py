"""Few queries per request against a long cache: the keys of a request are split over programs, then reduced.

    split     program (key/value head, request, split): a part of the request's keys -> a normalised output and its LSE
    reduce    program (request's query, head): the parts' outputs, weighted by their LSE -> the output

With a single split, the first kernel writes the output, and the second is not launched. Programs of one request's heads
are neighbours in the grid and run at once, because they read adjacent memory.

The number of splits is a scalar, fixed when a graph is captured. The device computes the keys per split from the
request's length, so one graph serves all lengths. A split without keys has LSE -inf and weight 0.

Source: Flash-Decoding (Dao et al., 2023).
"""

from dataclasses import dataclass

import triton.language as tl
from torch import Tensor

from attention.interface import AttentionShape
from attention.kernels.attend import launch_attention
from attention.kernels.tile import LOG2_E, PagedBatch, PagedLayer, TileSize
from ubatch.kernels.triton_jit import cdiv, jit, power_of_2

MAX_SPLITS = 64
_NUMBERS_PER_WARP = 1024  # elements of the splits' outputs that a warp reduces
MIN_KEYS_PER_SPLIT = 128  # with fewer keys, reducing costs more than splitting gains
_MISSING = 16  # one program of so many may be missing


@dataclass(frozen=True)
class DecodeSplits:
    """How a decode batch's keys are split; fixed when a graph is captured.

    Attributes:
        max_queries: most queries of a request; requests with more are left to `prefill_attention`.
        num_splits: splits of a request's keys.
        tile: a program's tile; None is `TileSize.decode`.
    """

    max_queries: int
    num_splits: int
    tile: TileSize | None = None

    @classmethod
    def choose(
        cls,
        shape: AttentionShape,
        num_reqs: int,
        max_queries: int,
        max_seq_len: int,
        num_programs: int,
        tile: TileSize | None = None,
        blocks: int | None = None,
    ) -> "DecodeSplits":
        """Choose enough splits to launch `num_programs` programs, but none shorter than `MIN_KEYS_PER_SPLIT` keys.

        Keys stay whole where a sixteenth of the programs is missing: to split them would give a few idle processors
        work, and all of them a second kernel.

        Args:
            max_queries: most queries of a request.
            max_seq_len: tokens of the longest request; for a graph, of the longest that its limits allow.
            num_programs: programs to launch, if there are enough keys to split.
            blocks: programs per request and split; None is one per key/value head.
        """
        seen = max_seq_len
        if shape.sliding_window is not None:
            seen = min(seen, shape.sliding_window + max_queries - 1)
        per_split = max(1, num_reqs) * (blocks or shape.num_kv_heads)
        nearly_all = per_split >= num_programs - num_programs // _MISSING
        wanted = 1 if nearly_all else cdiv(num_programs, per_split)
        return cls(max_queries, max(1, min(wanted, cdiv(seen, MIN_KEYS_PER_SPLIT), MAX_SPLITS)), tile)

    def workspace_numbers(self, shape: AttentionShape, num_reqs: int) -> int:
        """Float32 elements of workspace that `decode_attention` needs."""
        if self.num_splits == 1:
            return 0
        return num_reqs * self.max_queries * shape.num_heads * self.num_splits * (shape.value_dim + 1)

    def partials(
        self, shape: AttentionShape, num_reqs: int, workspace: Tensor
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Views of a workspace of at least `workspace_numbers` elements: the splits' outputs and LSEs, both flat; None
        with a single split."""
        if self.num_splits == 1:
            return None, None
        numbers = self.workspace_numbers(shape, num_reqs)
        parts = numbers // (shape.value_dim + 1)
        out, lse = workspace[:numbers].split([numbers - parts, parts])
        return out, lse


@jit("query_start_loc", "num_splits")
def _reduce_kernel(
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    query_start_loc: tl.tensor,
    sinks: tl.tensor,
    num_splits: tl.tensor,
    MAX_QUERIES: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    row, head = tl.program_id(0), tl.program_id(1)
    request, query = row // MAX_QUERIES, row % MAX_QUERIES
    start = tl.load(query_start_loc + request)
    num_queries = tl.load(query_start_loc + request + 1) - start
    if (query >= num_queries) | (num_queries > MAX_QUERIES):
        return
    splits, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    is_split = splits < num_splits
    part = (row.to(tl.int64) * NUM_HEADS + head) * num_splits + splits
    part_lse = tl.load(partial_lse + part, mask=is_split, other=float("-inf"))
    inside = is_split[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(partial_out + part[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0)

    highest = tl.max(part_lse, 0)
    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(part_lse - shift)
    weight_sum = tl.sum(weights, 0)
    if sinks is not None:
        weight_sum += tl.exp2(sink - shift)
    result = tl.sum(parts * weights[:, None], 0) / tl.where(weight_sum > 0, weight_sum, 1.0)
    token = (start + query).to(tl.int64) * NUM_HEADS + head
    tl.store(out + token * HEAD_DIM + dims, result, mask=dims < HEAD_DIM)


def decode_attention(q: Tensor, out: Tensor, where: PagedLayer, splits: DecodeSplits, workspace: Tensor) -> None:
    """Attend for every request that has 1 to `splits.max_queries` queries; other requests' rows are not written.

    Args:
        q: `[T, num_heads, head_dim]`.
        out: `[T, num_heads, value_dim]`, contiguous; written.
        workspace: float32, at least `splits.workspace_numbers(...)`; overwritten.
    """
    shape, batch = where.shape, where.batch
    if not batch.num_reqs:
        return
    partials = splits.partials(shape, batch.num_reqs, workspace)
    launch_attention(
        (shape.num_kv_heads, batch.num_reqs, splits.num_splits),
        q,
        out,
        where,
        splits.tile or TileSize.decode(shape, splits.max_queries, q.dtype),
        partials=partials,
        num_splits=splits.num_splits,
        max_queries=splits.max_queries,
    )
    reduce_splits(out, partials, batch, splits, where.sinks)


def reduce_splits(
    out: Tensor,
    partials: tuple[Tensor, Tensor] | tuple[None, None],
    batch: PagedBatch,
    splits: DecodeSplits,
    sinks: Tensor | None = None,
) -> None:
    """Reduce the splits of every request to one output; a single split wrote it already.

    Args:
        out: `[T, heads, dim]`, contiguous; written.
        partials: outputs `[num_reqs * max_queries, heads, num_splits, dim]` float32, and LSEs
            `[num_reqs * max_queries, heads, num_splits]` float32, base-2 logarithms; both flat.
        sinks: `[heads]` logits.
    """
    if splits.num_splits == 1:
        return
    _, num_heads, dim = out.shape
    block_s, block_d = power_of_2(splits.num_splits), power_of_2(dim)
    _reduce_kernel[batch.num_reqs * splits.max_queries, num_heads](
        out,
        *partials,
        batch.query_start_loc,
        sinks,
        splits.num_splits,
        MAX_QUERIES=splits.max_queries,
        NUM_HEADS=num_heads,
        HEAD_DIM=dim,
        BLOCK_S=block_s,
        BLOCK_D=block_d,
        num_warps=max(1, min(16, block_s * block_d // _NUMBERS_PER_WARP)),
    )
