"""A combine of `torch_dist` that sends the rows a block of experts has completed while the next one is computed.

    comp:  | block 0 | block 1 | block 2 |                a block: some of a rank's experts, in their order
    comm:            | rows 0  | rows 1  | rows 2 |       rows b: those whose last expert is in block b

So every row is sent once, and only rows that visit the last block wait for it. Each block is a separate all-to-all,
which the host launches behind the block's kernels: with gloo and with NCCL no kernel waits for a signal. The ranks
exchange the number of rows per block before the dispatch, so that the host waits for nothing else. Rows are returned by
rank, and those of one rank in the order of the tokens.

Source: SGLang's single-batch overlap, whose blocks are of rows and told by signals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.all2all.checks import refuse_gradients
from moe.all2all.chunks import blocks_of
from moe.all2all.voted import most_voted_tokens
from moe.placement import block_of
from moe.segments import segment_sum
from ubatch import CommGroup, Transfer, launch_all_to_all_single

_BLOCKS = 8
"""Most blocks. Each costs a launch and the link's latency; no compute hides the last one."""


class BlockRoutes:
    """Which of this rank's tokens visit which rank, and with which block of its experts they are done there.

    Args:
        topk_ids: `[T, k]`.

    Attributes:
        blocks: of a rank's experts, the same on every rank.
        hit: `[R, T]` bool, the visits.
        rows: `[R, T]`, for every visit its row among all that come home, block by block and rank by rank.
        counts: `[R, blocks]` int64, how many rows each rank sends home with each block.
    """

    def __init__(self, topk_ids: Tensor, ranks: int, num_local: int) -> None:
        self.blocks = blocks_of(num_local, min(_BLOCKS, num_local))
        rank_of_choice = torch.div(topk_ids, num_local, rounding_mode="floor")  # -1 stays -1, no rank's
        each_rank = torch.arange(ranks, device=topk_ids.device)
        block = block_of(topk_ids - rank_of_choice * num_local, self.blocks)
        last = torch.where(rank_of_choice == each_rank[:, None, None], block, -1).amax(-1)
        self.hit = last >= 0
        ends = last == torch.arange(len(self.blocks), device=topk_ids.device)[:, None, None]  # [blocks, R, T]
        self.rows = ((ends.flatten().cumsum(0) - 1).view_as(ends) * ends).sum(0)
        self.counts = ends.sum(2).t().contiguous()


@dataclass(frozen=True)
class BlocksHandle:
    """What combine needs to return results.

    Attributes:
        blocks: of local experts.
        sent, received: `[block][rank]` rows that come back to this rank, and go back from it.
        row_of_visit: `[sum(sent)]`, the row of each (token, rank) visit among all that come back, in token order.
        visit_offsets: `[T + 1]`, where each token's visits begin.
    """

    blocks: Sequence[range]
    sent: list[list[int]]
    received: list[list[int]]
    row_of_visit: Tensor
    visit_offsets: Tensor


class TorchDistBlocks:
    """See `BlockCombine`."""

    def __init__(self, group: CommGroup, handle: BlocksHandle) -> None:
        self.blocks = handle.blocks
        self._group = group
        self._handle = handle
        self._sizes = zip(handle.sent, handle.received, strict=True)

    def send(self, y: Tensor) -> Transfer[Tensor]:
        """See `BlockCombine`."""
        refuse_gradients(y, name="torch_dist")
        back, away = next(self._sizes)
        most = most_voted_tokens(self._group)
        return launch_all_to_all_single(y, self._group, back, away, name="combine", most_rows=most)

    def sum_up(self, arrived: Sequence[Tensor]) -> Tensor:
        """See `BlockCombine`. In the order of the ranks, as in one piece."""
        return segment_sum(torch.cat(list(arrived)), self._handle.row_of_visit, self._handle.visit_offsets)
