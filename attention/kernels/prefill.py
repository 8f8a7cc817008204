"""Ragged queries over the cache, prefixes included: one program per tile of queries and key/value head.

Tiles are assigned to requests once per step, see `attention.kernels.planning`. The step's own keys and values are read
back from the cache, so the kernel treats a prompt, the next chunk of a prompt and a decode row alike.

Source: FlashAttention-2 (Dao, 2023).
"""

from torch import Tensor

from attention.interface import AttentionShape
from attention.kernels.attend import launch_attention
from attention.kernels.tile import PagedBatch, TileSize
from attention.kv_cache import PagedKVCache


def prefill_attention(
    q: Tensor,
    out: Tensor,
    shape: AttentionShape,
    cache: PagedKVCache,
    layer: int,
    batch: PagedBatch,
    tiles: Tensor,
    size: TileSize,
    sinks: Tensor | None = None,
) -> None:
    """Attend for every query that is in a tile; other queries' rows are not written.

    Args:
        q: `[T, num_heads, head_dim]`.
        out: `[T, num_heads, value_dim]`, contiguous; written.
        cache: read; it holds the step's keys and values already.
        tiles: `[tiles, 2]` int32 from `planning.plan_tiles`, for `size.queries(shape)` queries each.
        sinks: `[num_heads]` logits, one more term in each head's denominator.
    """
    if tiles.shape[0]:
        grid = (tiles.shape[0], shape.num_kv_heads, 1)
        launch_attention(grid, q, out, shape, cache, layer, batch, size, sinks, tiles=tiles)
