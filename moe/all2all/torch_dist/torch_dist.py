"""`torch_dist`: all-to-alls of exactly the rows that are needed, over gloo or NCCL.

    who      hit[r, t]: rank r holds an expert of token t; its true entries, rank by rank, are the rows to send
    counts   launched first; while they travel ...
    pack     ... the rows are gathered, one copy of a token per rank however many of its experts are there
    payload  hidden state, ids and weights in one message; from here on the host is free

    combine  one row per (token, rank) travels back, already summed over that rank's experts
    sum      the owner adds a token's rows in rank order

Counts make the host wait once per layer for a round trip, in exchange for sending no padding. On CUDA the host waits
for the counts alone, not for what the device has queued meanwhile; everything after them has a size that it knows. In
decode steps, if the ranks know each other's numbers of tokens from the vote, and few rows would be sent in vain, every
token travels to every rank instead, without counts.

Chunks of experts exchange their counts together, so the host waits once for all of them, and send together what one
chunk would (`moe.all2all.torch_dist.chunks`).

A signalled combine sends the rows that a block of experts has completed while the next one is computed.

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
from functools import lru_cache, partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from moe.all2all.base import All2All, All2AllTraits, visited
from moe.all2all.layouts import Dispatched, blocks_of, only_block
from moe.all2all.payload import check_dispatch, pack_rows, refuse_gradients, unpack_rows
from moe.all2all.torch_dist.chunks import ChunkedRows, ChunkHandle, Cube, Handle, Routes, tokens_of, visits_of
from moe.all2all.voted import most_voted_tokens, tokens_in, unpadded
from moe.placement import block_of, local_experts
from moe.segments import segment_sum
from ubatch import (
    CommGroup,
    ForwardMode,
    Transfer,
    copy_to_host,
    get_forward_context,
    launch_all_gather,
    launch_all_to_all_single,
)
from ubatch.ranks import check_group

H = TypeVar("H")

_SPARE_BYTES = 16 << 10
"""How much of a layer may travel in vain: what a link of 1 Gbit/s carries in the time that counts take to go round."""
_EVERY_ROW = frozenset({ForwardMode.DECODE, ForwardMode.TARGET_VERIFY})
"""Modes in which every layer runs on all the tokens that the ranks voted on; else the last one may run on fewer."""


class TorchDistAll2All(All2All[Any]):
    """Sends each token once to every rank that holds one of its experts.

    Raises:
        ConfigError: the experts do not divide by the ranks.
    """

    may_signal: ClassVar[bool] = True

    def __init__(self, *, group: CommGroup, num_experts: int) -> None:
        check_group(group, "all2all back end 'torch_dist' needs")
        self.group = group
        self.num_experts = num_experts
        self.experts = local_experts(num_experts, group.rank, group.size)
        self.traits = All2AllTraits(
            is_async=True,
            blocks_host=group.size > 1,
            capturable=False,
            max_lanes=None,
            max_chunks=len(self.experts),
            other_ranks=group.size - 1,
            routed=True,
            cuts_combine=True,
            once=True,
            sends_blocks=True,
        )

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Dispatched[Handle]]:
        """See `All2All`.

        Raises:
            ConfigError: a decode step's layer has other tokens than those that the ranks voted on.
        """
        check_dispatch(x, topk_ids, topk_weights, name="torch_dist")
        if (tokens := self._sent_to_all(x, topk_ids.shape[1])) is not None:
            return self._dispatch_to_all(x, topk_ids, topk_weights, tokens)
        (hit,) = self._ranks_hit(topk_ids, [range(len(self.experts))])
        counts = self._exchange(hit.sum(1, keepdim=True))
        rows = pack_rows(x, topk_ids, topk_weights)
        (sent,) = counts.sent()
        rows = rows.index_select(0, tokens_of(hit, sum(sent)))
        visits = visits_of(hit, sum(sent))
        (received,) = counts.received()
        most = most_voted_tokens(self.group)
        return self._send(rows, sent, received, most, x.shape[1], Handle(sent, received, most, *visits))

    def dispatch_blocks(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Dispatched[BlocksHandle]]:
        check_dispatch(x, topk_ids, topk_weights, name="torch_dist")
        routes = BlockRoutes(topk_ids, self.group.size, len(self.experts))
        counts = self._exchange(routes.counts)
        rows = pack_rows(x, topk_ids, topk_weights)
        sent = counts.sent()
        going = _sum_of(sent)
        rows = rows.index_select(0, tokens_of(routes.hit, sum(going)))
        visits = visits_of(routes.hit, sum(going), routes.rows)
        received = counts.received()
        handle = BlocksHandle(routes.blocks, sent, received, *visits)
        return self._send(rows, going, _sum_of(received), most_voted_tokens(self.group), x.shape[1], handle)

    def combine_blocks(self, handle: BlocksHandle) -> TorchDistBlocks:
        return TorchDistBlocks(self.group, handle)

    def dispatch_chunks(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]
    ) -> Sequence[Transfer[Dispatched[ChunkHandle]]]:
        transfers, rows, handles = self._dispatch(x, topk_ids, topk_weights, blocks, together=False)

        def arrive(chunk: int, handle: ChunkHandle, arrived: Tensor) -> Dispatched[ChunkHandle]:
            rows.arrive(arrived)
            return rows.rows_of(chunk, handle)

        return [
            transfer.map(partial(arrive, chunk, handle))
            for chunk, (transfer, handle) in enumerate(zip(transfers, handles, strict=True))
        ]

    def dispatch_cut(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]
    ) -> Transfer[Sequence[Dispatched[ChunkHandle]]]:
        (transfer,), rows, handles = self._dispatch(x, topk_ids, topk_weights, blocks, together=True)

        def arrive(arrived: Tensor) -> list[Dispatched[ChunkHandle]]:
            rows.arrive(arrived)
            return [rows.rows_of(chunk, handle) for chunk, handle in enumerate(handles)]

        return transfer.map(arrive)

    def combine(self, y: Tensor, handle: Handle) -> Transfer[Tensor]:
        """See `All2All`. For a chunk, it returns the rows whose last chunk this is."""
        if torch.is_grad_enabled():
            refuse_gradients(y, name="torch_dist")
        if isinstance(handle, ChunkHandle):
            y = handle.rows.add(handle.chunk, y)
        sent, received = handle.sent, handle.received
        results = launch_all_to_all_single(y, self.group, sent, received, name="combine", most_rows=handle.most)
        return results.map(partial(segment_sum, index=handle.row_of_visit, offsets=handle.visit_offsets))

    def _sent_to_all(self, x: Tensor, top_k: int) -> list[int] | None:
        """Every rank's tokens if all of them travel to every rank; None if counts are exchanged."""
        context = get_forward_context()
        if context is None or context.global_mode not in _EVERY_ROW or self.group.size == 1:
            return None
        known = tokens_in(context, self.group)
        if known is None:
            return None
        needless = 1.0 - visited(len(self.experts), self.num_experts, top_k)
        row_bytes = 2 * x.shape[1] * x.element_size() + 8 * top_k  # there and back
        return list(known) if max(known) * self.traits.other_ranks * needless * row_bytes <= _SPARE_BYTES else None

    def _dispatch_to_all(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, tokens: list[int]
    ) -> Transfer[Dispatched[Handle]]:
        own, ranks, (rows, hidden_size) = tokens[self.group.rank], self.group.size, x.shape
        if rows != own:
            x, topk_ids, topk_weights = unpadded(x, topk_ids, topk_weights, tokens, self.group)
        packed = pack_rows(x, topk_ids, topk_weights)
        visits = (
            _visits_of_all(own, rows, ranks) if x.device.type == "cpu" else _make_visits(own, rows, ranks, x.device)
        )
        handle = Handle([own] * ranks, tokens, max(tokens), *visits)
        gathered = launch_all_gather(packed, self.group, sizes=tokens, name="dispatch")
        return gathered.map(partial(self._delivered, hidden_size=hidden_size, handle=handle))

    def _dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range], *, together: bool
    ) -> tuple[list[Transfer[Tensor]], ChunkedRows, list[ChunkHandle]]:
        """Launch the rows of all chunks, together or one chunk after the other."""
        check_dispatch(x, topk_ids, topk_weights, name="torch_dist")
        routes = Routes(self._ranks_hit(topk_ids, blocks), together=together)
        counts = self._exchange(routes.counts)
        packed = pack_rows(x, topk_ids, topk_weights)
        chunks, launches = range(len(blocks)), range(1 if together else len(blocks))
        _, own_ends = _cubes(counts.sent(), len(blocks))
        sent = [_sum_of(own_ends[chunk]) for chunk in launches]
        payloads = [packed.index_select(0, routes.tokens_of(chunk, sum(sent[chunk]))) for chunk in launches]
        back = [_sum_of([came[chunk] for came in own_ends]) for chunk in chunks]
        returns = [routes.returns(chunk, sum(back[chunk])) for chunk in chunks]

        visits, ends = _cubes(counts.received(), len(blocks))
        rows = ChunkedRows(visits, ends, blocks, self.experts, x.shape[1])
        most = most_voted_tokens(self.group)
        handles = [
            ChunkHandle(back[chunk], _sum_of([came[chunk] for came in ends]), most, *returns[chunk], rows, chunk)
            for chunk in chunks
        ]
        transfers = [
            self._launch(payload, sent[chunk], _sum_of(ends[chunk]), most)
            for chunk, payload in zip(launches, payloads, strict=True)
        ]
        return transfers, rows, handles

    def _ranks_hit(self, topk_ids: Tensor, blocks: Sequence[range]) -> list[Tensor]:
        """Per block `[R, T]` bool: which rank holds an expert of which token there."""
        num_local = len(self.experts)
        rank_of_choice = torch.div(topk_ids, num_local, rounding_mode="floor")  # -1 stays -1, no rank's
        ranks = torch.arange(self.group.size, device=topk_ids.device)
        here = rank_of_choice == ranks[:, None, None]
        if len(blocks) == 1 and len(blocks[0]) == num_local:
            return [here.any(-1)]
        return [(here & (only_block(topk_ids, block, num_local) >= 0)).any(-1) for block in blocks]

    def _exchange(self, counts: Tensor) -> _Counts:
        """Launch the exchange of `[R, n]` numbers, row r for rank r."""
        theirs = launch_all_to_all_single(counts, self.group, name="dispatch_counts", to_host=True, most_rows=1)
        theirs = self.on_counts(theirs.off_link())
        return _Counts(copy_to_host(counts, group=self.group, name="dispatch_counts"), theirs)

    def _send(
        self, rows: Tensor, sent: list[int], received: list[int], most: int | None, hidden_size: int, handle: H
    ) -> Transfer[Dispatched[H]]:
        """Launch one dispatch's packed rows."""
        payload = self._launch(rows, sent, received, most)
        return payload.map(partial(self._delivered, hidden_size=hidden_size, handle=handle))

    def _delivered(self, rows: Tensor, hidden_size: int, handle: H) -> Dispatched[H]:
        return Dispatched(*unpack_rows(rows, hidden_size), handle, self.experts)

    def _launch(self, rows: Tensor, sent: list[int], received: list[int], most: int | None) -> Transfer[Tensor]:
        return launch_all_to_all_single(rows, self.group, received, sent, name="dispatch", most_rows=most)


@dataclass(frozen=True)
class _Counts:
    """Numbers of rows from rank to rank, on their way to the host: `[R, n]`.

    Attributes:
        ours: of what goes to every rank.
        theirs: of what comes from every rank.
    """

    ours: Transfer[list[Tensor]]
    theirs: Transfer[Tensor]

    def sent(self) -> list[list[int]]:
        """`[n][R]`, to every rank."""
        (ours,) = self.ours.wait()
        rows: list[list[int]] = ours.t().tolist()
        return rows

    def received(self) -> list[list[int]]:
        """`[n][R]`, from every rank."""
        rows: list[list[int]] = self.theirs.wait().t().tolist()
        return rows


@lru_cache(256)
def _visits_of_all(tokens: int, rows: int, ranks: int) -> tuple[Tensor, Tensor]:
    return _make_visits(tokens, rows, ranks, torch.device("cpu"))


def _make_visits(tokens: int, rows: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`visits_of` for `tokens` that visit every rank, and padding behind them, `rows` in all, that visits none."""
    row_of_visit = torch.arange(ranks * tokens, device=device).view(ranks, tokens).t().flatten()
    return row_of_visit, torch.arange(rows + 1, device=device).clamp(max=tokens) * ranks


def _cubes(numbers: list[list[int]], chunks: int) -> tuple[Cube, Cube]:
    """`visits` and `ends` of what was exchanged as `Routes.counts`."""
    rows = [numbers[start : start + chunks] for start in range(0, len(numbers), chunks)]
    return rows[:chunks], rows[chunks:]


def _sum_of(counts: Sequence[Sequence[int]]) -> list[int]:
    """The sum of the counts, per rank."""
    return [sum(of_rank) for of_rank in zip(*counts, strict=True)]


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
