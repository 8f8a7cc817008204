"""`torch_dist`: all-to-alls of exactly the rows that are needed, over gloo or NCCL.

    who      hit[r, t]: rank r holds an expert of token t; its true entries, rank by rank, are the rows to send
    counts   launched first; while they travel ...
    pack     ... the rows are gathered, one copy of a token per rank however many of its experts are there
    payload  hidden state, ids and weights in one message; from here on the host is free

    combine  one row per (token, rank) travels back, already summed over that rank's experts
    sum      the owner adds a token's rows in rank order

Counts make the host wait once per layer for a round trip, in exchange for sending no padding. Where all ranks know
each other's token counts from the vote, `allgather_reducescatter` does without.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.all2all.base import All2AllTraits, Dispatched, OnCounts, at_once, check_dispatch, refuse_gradients
from moe.all2all.payload import pack_rows, unpack_rows
from moe.placement import local_experts
from moe.segments import segment_offsets, segment_sum
from ubatch import CommGroup, ConfigError, Transfer, launch_all_to_all_single

__all__ = ["TorchDistAll2All"]


@dataclass(frozen=True)
class Handle:
    """How results come home.

    Attributes:
        sent, received: rows this rank sent to, and got from, every rank.
        row_of_visit: `[sum(sent)]`, the sent row of each (token, rank) visit, in token order.
        visit_offsets: `[T + 1]`, where each token's visits begin.
    """

    sent: list[int]
    received: list[int]
    row_of_visit: Tensor
    visit_offsets: Tensor


class TorchDistAll2All:
    """Sends each token once to every rank that holds one of its experts.

    Args:
        group: the expert-parallel ranks.
        num_experts: experts of all ranks.

    Raises:
        ConfigError: the experts do not divide by the ranks.
    """

    def __init__(self, *, group: CommGroup, num_experts: int) -> None:
        if not isinstance(group, CommGroup):
            raise ConfigError(
                f"all2all back end 'torch_dist' needs a CommGroup, not {type(group).__name__}. "
                "Make one: CommGroup.from_process_group(pg)."
            )
        self.group = group
        self.on_counts: OnCounts = at_once
        self.num_experts = num_experts
        self.experts = local_experts(num_experts, group.rank, group.size)
        self.traits = All2AllTraits(
            is_async=True,
            blocks_host=group.size > 1,
            capturable=False,
            max_lanes=None,
            max_chunks=1,
            other_ranks=group.size - 1,
            routed=True,
        )

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Dispatched[Handle]]:
        """See `All2All`."""
        check_dispatch(x, topk_ids, topk_weights, name="torch_dist")
        hit = self._ranks_hit(topk_ids)
        sent_counts = hit.sum(1)
        counts = launch_all_to_all_single(sent_counts, self.group, name="dispatch_counts").off_link()
        counts = self.on_counts(counts)

        token_of_row = hit.nonzero()[:, 1]
        rows = pack_rows(x, topk_ids, topk_weights).index_select(0, token_of_row)
        row_of_visit, visit_offsets = _visits(hit)
        sent = sent_counts.tolist()

        received = counts.wait().tolist()
        handle = Handle(sent, received, row_of_visit, visit_offsets)
        payload = launch_all_to_all_single(rows, self.group, received, sent, name="dispatch")
        return payload.map(lambda arrived: self._unpack(arrived, x.shape[1], handle))

    def combine(self, y: Tensor, handle: Handle) -> Transfer[Tensor]:
        """See `All2All`."""
        refuse_gradients(y, name="torch_dist")
        results = launch_all_to_all_single(y, self.group, handle.sent, handle.received, name="combine")
        return results.map(lambda rows: segment_sum(rows, handle.row_of_visit, handle.visit_offsets))

    def _ranks_hit(self, topk_ids: Tensor) -> Tensor:
        """`[R, T]` bool: which rank holds an expert of which token."""
        rank_of_choice = torch.div(topk_ids, len(self.experts), rounding_mode="floor")  # -1 stays -1, no rank's
        ranks = torch.arange(self.group.size, device=topk_ids.device)
        return (rank_of_choice == ranks[:, None, None]).any(-1)

    def _unpack(self, rows: Tensor, hidden_size: int, handle: Handle) -> Dispatched[Handle]:
        hidden_states, topk_ids, topk_weights = unpack_rows(rows, hidden_size)
        return Dispatched(hidden_states, topk_ids, topk_weights, handle, self.experts)


def _visits(hit: Tensor) -> tuple[Tensor, Tensor]:
    """The sent row of every visit in token order, and where each token's begin; rows are sent in rank order."""
    row_of_hit = (hit.flatten().cumsum(0) - 1).view_as(hit)
    by_token = hit.t()
    return row_of_hit.t()[by_token], segment_offsets(by_token.sum(1))
