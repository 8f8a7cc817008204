"""`allgather_reducescatter`: every token visits every rank; no counts are exchanged.

    dispatch  all-gather of all tokens; each rank computes what its own experts add
    combine   reduce-scatter of the partial sums: each rank gets its own tokens' total

Sends `R - 1` copies of every token. With few ranks, or many experts per token, most of those are needed anyway, and
there is no gather, no sorting by rank and no wait for counts: the number of tokens of every rank is known from the
vote (`ForwardContext.tokens_across_ranks`). Without a vote the ranks exchange it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.all2all.base import All2All, All2AllTraits
from moe.all2all.layouts import Dispatched
from moe.all2all.payload import check_dispatch, pack_rows, refuse_gradients, unpack_rows
from moe.all2all.voted import unpadded, voted_tokens
from moe.placement import local_experts
from ubatch import CommGroup, Transfer, launch_all_gather, launch_reduce_scatter
from ubatch.ranks import check_group


@dataclass(frozen=True)
class Handle:
    """What combine needs to return results.

    Attributes:
        padding: rows of this rank behind its tokens, which were not sent.
    """

    sizes: list[int]
    padding: int


class AllGatherReduceScatterAll2All(All2All[Handle]):
    """Sends every token to all ranks.

    Args:
        group: the expert-parallel ranks; the same as those of the vote, in the same order.

    Raises:
        ConfigError: the experts do not divide by the ranks.
    """

    def __init__(self, *, group: CommGroup, num_experts: int) -> None:
        check_group(group, "all2all back end 'allgather_reducescatter' needs")
        self.group = group
        self.num_experts = num_experts
        self.experts = local_experts(num_experts, group.rank, group.size)
        self.traits = All2AllTraits(
            is_async=True,
            blocks_host=False,
            capturable=group.stream_ordered(torch.device("cuda")),
            max_lanes=None,
            max_chunks=len(self.experts),
            other_ranks=group.size - 1,
            routed=False,
        )

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Dispatched[Handle]]:
        """See `All2All`.

        Raises:
            ConfigError: the vote's token count differs from this layer's.
        """
        check_dispatch(x, topk_ids, topk_weights, name="allgather_reducescatter")
        sizes = self._tokens_across_ranks(x)
        padding = x.shape[0] - sizes[self.group.rank]
        hidden_size, handle = x.shape[1], Handle(sizes, padding)
        if padding:
            x, topk_ids, topk_weights = unpadded(x, topk_ids, topk_weights, sizes, self.group)
        rows = pack_rows(x, topk_ids, topk_weights)
        gathered = launch_all_gather(rows, self.group, sizes=sizes, name="dispatch")
        return gathered.map(lambda arrived: self._unpack(arrived, hidden_size, handle))

    def combine(self, y: Tensor, handle: Handle) -> Transfer[Tensor]:
        refuse_gradients(y, name="allgather_reducescatter")
        own_rows = launch_reduce_scatter(y, self.group, sizes=handle.sizes, name="combine")
        if not handle.padding:
            return own_rows
        return own_rows.map(lambda rows: torch.cat([rows, rows.new_zeros(handle.padding, rows.shape[1])]))

    def _tokens_across_ranks(self, x: Tensor) -> list[int]:
        known = voted_tokens(self.group)
        if known is not None:
            return list(known)
        own = torch.full((1,), x.shape[0], device=x.device)
        counts = launch_all_gather(own, self.group, name="dispatch_counts", to_host=True).off_link()
        sizes: list[int] = self.on_counts(counts).wait().tolist()
        return sizes

    def _unpack(self, rows: Tensor, hidden_size: int, handle: Handle) -> Dispatched[Handle]:
        hidden_states, topk_ids, topk_weights = unpack_rows(rows, hidden_size)
        return Dispatched(hidden_states, topk_ids, topk_weights, handle, self.experts)
