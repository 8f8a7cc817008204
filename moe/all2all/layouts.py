"""The two layouts in which tokens arrive at a rank's experts; a back end's traits say which.

Dispatched          one row per token that visits this rank, with its ids and weights; results come weighted
BatchedDispatch     one row per token and expert, an equal room for every expert; combine applies the weights

A layer may run in chunks: blocks of experts that are dispatched, computed and combined separately. A chunk is the same
block of every rank's local experts. So each rank has equally many experts in every chunk. There are two ways to
dispatch:

    dispatch_chunks    one dispatch per chunk, all launched at once. Works with any back end: the routing is masked to
                       the chunk, so that a token travels for it only to ranks that hold one of its experts there
    dispatch_cut       one dispatch for all chunks; what arrived is cut. Every chunk's results travel home alone

A back end that can do one of them better overrides it (`moe.all2all.base`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ubatch import ConfigError

HandleT = TypeVar("HandleT")


@dataclass(frozen=True)
class Dispatched(Generic[HandleT]):
    """The rows that a dispatch delivers to a rank's experts.

    Attributes:
        hidden_states: `[N, H]`, tokens of all ranks that visit `experts`; rows may be strided.
        topk_ids: `[N, k]` int32 or int64, global expert ids; those outside `experts` are for other ranks.
        topk_weights: `[N, k]` float32.
        handle: what this back end's `combine` needs to send the results home.
        experts: the block of experts these rows are for: all of the rank's, unless it came for one of several chunks.
        scales: `[N, H / 128]` float32 where `hidden_states` are float8_e4m3fn in blocks of 128, else None.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    handle: HandleT
    experts: range
    scales: Tensor | None = None


@dataclass(frozen=True)
class BatchedDispatch(Generic[HandleT]):
    """The rows that a dispatch delivers to a rank's experts, sorted by expert, with room for `C` rows each.

    Nothing here is read on the host, so that it can be captured. Rows behind an expert's count are undefined, in the
    input and in the experts' results.

    Attributes:
        hidden_states: `[E_local, C, H]`; a token is there once for each of its experts.
        rows_per_expert: `[E_local]` int32, on the device.
        scales: `[E_local, C, H / 128]` float32 where `hidden_states` are float8_e4m3fn in blocks of 128, else None.
            Not always contiguous.
        handle: what this back end's `combine` needs to send the results home.
        experts: the block of experts these rows are for: all of the rank's, unless it came for one of several chunks.
    """

    hidden_states: Tensor
    rows_per_expert: Tensor
    scales: Tensor | None
    handle: HandleT
    experts: range


@lru_cache(64)
def blocks_of(num_local: int, chunks: int) -> tuple[range, ...]:
    """`num_local` experts in `chunks` blocks, as equal as can be.

    Raises:
        ConfigError: a block would be empty.
    """
    if not 1 <= chunks <= num_local:
        raise ConfigError(f"{num_local} experts of a rank cannot be cut into {chunks} chunks. Choose 1 to {num_local}.")
    bounds = [block * num_local // chunks for block in range(chunks + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def only_block(topk_ids: Tensor, block: range, num_local: int) -> Tensor:
    """`topk_ids`, with -1 for every expert outside of `block` of its rank's `num_local` experts."""
    slot = topk_ids % num_local
    return torch.where((topk_ids >= 0) & (slot >= block.start) & (slot < block.stop), topk_ids, -1)


def ids_of_blocks(topk_ids: Tensor, blocks: Sequence[range], num_local: int) -> list[Tensor]:
    """The ids that each block's dispatch is routed by; see `only_block`."""
    return [topk_ids] if len(blocks) == 1 else [only_block(topk_ids, block, num_local) for block in blocks]


def cut(arrived: Dispatched[HandleT], blocks: Sequence[range]) -> list[Dispatched[HandleT]]:
    """The rows of one dispatch, once for each block: all rows, but only the block's ids."""
    first, num_local = arrived.experts.start, len(arrived.experts)
    return [
        replace(
            arrived,
            topk_ids=only_block(arrived.topk_ids, block, num_local),
            experts=range(first + block.start, first + block.stop),
        )
        for block in blocks
    ]
