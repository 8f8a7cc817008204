"""Chunks of experts over `torch_dist`: a token travels to a rank once, however many chunks it visits there.

    first   the first chunk in which a token visits a rank: its dispatch carries the row, later chunks find it there
    last    the last one: its combine carries the row's sum over all chunks home; earlier ones only add to it

So chunks send no more bytes than one would, in uneven shares: the first dispatch and the last combine are the largest
(`All2AllTraits.chunk_shares`). A dispatch for all chunks is the same with every `first` the first chunk.

Both sides know which rows those are: the owner from its routing, the receiver from the ids that came with the rows.
How many, by chunk, is exchanged before, so that the host waits for nothing else.

    cube[a, c]      rows that came in chunk a's dispatch and ...
    visits          ... are computed in chunk c
    ends            ... go home in chunk c

Rows come, and go home, by rank; of one rank by the chunk in which they came; of one chunk in the order of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.all2all.layouts import Dispatched, only_block
from moe.all2all.payload import unpack_rows
from moe.segments import segment_offsets

Cube = list[list[list[int]]]
"""`[a][c][rank]` rows."""


class Routes:
    """Which of this rank's tokens travel in which chunk, to which rank.

    Args:
        hits: per chunk `[R, T]` bool, which rank holds an expert of which token there.
        together: one dispatch carries all.

    Attributes:
        counts: `[R, 2 * C * C]` int64, what each rank has to know: `visits` and `ends` of the rows sent to it.
    """

    def __init__(self, hits: Sequence[Tensor], *, together: bool) -> None:
        hit = torch.stack(list(hits))  # [C, R, T]
        chunks = len(hits)
        number = torch.arange(chunks, device=hit.device).view(-1, 1, 1)
        travels, numbered = hit.any(0), hit.to(torch.int8)
        first = torch.zeros_like(travels, dtype=torch.int64) if together else numbered.argmax(0)
        last = chunks - 1 - numbered.flip(0).argmax(0)
        self._starts = travels & (first == number)
        self._ends = travels & (last == number)
        cubes = [(self._starts.unsqueeze(1) & each.unsqueeze(0)).sum(-1) for each in (hit, self._ends)]
        self.counts = torch.stack(cubes).flatten(0, 2).t().contiguous()

    def tokens_of(self, chunk: int, rows: int) -> Tensor:
        """`[rows]`, the tokens that chunk's dispatch carries."""
        return tokens_of(self._starts[chunk], rows)

    def returns(self, chunk: int, rows: int) -> tuple[Tensor, Tensor]:
        """How the rows that this chunk's combine brings are added up; see `visits_of`."""
        by_rank = (self._starts & self._ends[chunk]).transpose(0, 1)  # [R, C, T]
        return visits_of(by_rank.flatten(0, 1), rows)


@dataclass(frozen=True)
class Handle:
    """What combine needs to return results.

    Attributes:
        sent, received: rows this rank sent to, and got from, every rank; those of a chunk's combine come back to this
            rank, and go back from it.
        most: the most tokens that a rank has; None if the ranks do not know it.
        row_of_visit: `[sum(sent)]`, the sent row of each (token, rank) visit, in token order.
        visit_offsets: `[T + 1]`, where each token's visits begin.
    """

    sent: list[int]
    received: list[int]
    most: int | None
    row_of_visit: Tensor
    visit_offsets: Tensor


@dataclass(frozen=True)
class ChunkHandle(Handle):
    """The same for the results of one chunk.

    Attributes:
        row_of_visit, visit_offsets: how the rows that this chunk's combine brings are added up.
        rows: all rows of this dispatch here; results are added to them.
    """

    rows: ChunkedRows
    chunk: int


class ChunkedRows:
    """The rows of one dispatch in chunks on the experts' rank, and the sums of the chunks computed so far.

    Args:
        visits, ends: of the rows that come here.
        blocks: of local experts, one per chunk.
    """

    def __init__(self, visits: Cube, ends: Cube, blocks: Sequence[range], experts: range, hidden_size: int) -> None:
        self._visits, self._ends = visits, ends
        self._blocks, self._experts, self._hidden_size = blocks, experts, hidden_size
        self._arrived: list[_Arrived] = []
        self._sums: list[Tensor] = []
        self._places: dict[int, list[Tensor | None]] = {}

    def arrive(self, rows: Tensor) -> None:
        """The next chunk's dispatch has brought `[N, H + ...]`, packed (`moe.all2all.payload`)."""
        hidden_states, ids, weights = unpack_rows(rows, self._hidden_size)
        slots = ids - self._experts.start
        chunk = sum((slots >= block.start).to(torch.int8) for block in self._blocks[1:])
        local = (slots >= 0) & (slots < len(self._experts))
        last = torch.where(local, chunk, -1).amax(1)
        came = [sum(of_rank) for of_rank in zip(*self._ends[len(self._arrived)], strict=True)]
        ranks = torch.cat([torch.full((count,), rank, device=rows.device) for rank, count in enumerate(came)])
        self._arrived.append(_Arrived(hidden_states, ids, weights, last, ranks))

    def rows_of(self, chunk: int, handle: ChunkHandle) -> Dispatched[ChunkHandle]:
        """The rows that the experts of `chunk` compute, with only this chunk's ids."""
        block = self._blocks[chunk]
        experts = self._experts[block.start : block.stop]
        places: list[Tensor | None] = []
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for arrived, visits in zip(self._arrived, self._visits, strict=False):
            here, rows = sum(visits[chunk]), arrived.ids.shape[0]
            place = None
            if here < rows:
                visiting = ((arrived.ids >= experts.start) & (arrived.ids < experts.stop)).any(1)
                place = tokens_of(visiting.unsqueeze(0), here)
            places.append(place)
            parts.append(arrived.rows(place))
        self._places[chunk] = places
        hidden_states, ids, weights = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        return Dispatched(hidden_states, only_block(ids, block, len(self._experts)), weights, handle, experts)

    def add(self, chunk: int, y: Tensor) -> Tensor:
        """Add `chunk`'s results; returns the sums that are complete with them, as they go home."""
        places = self._places.pop(chunk)
        sizes = [sum(visits[chunk]) for visits in self._visits[: len(places)]]
        for number, (place, part) in enumerate(zip(places, y.split(sizes), strict=True)):
            if number < len(self._sums):
                self._add_to(self._sums[number], place, part)
            elif place is None:
                self._sums.append(part)  # all of them, for the first time
            else:
                self._sums.append(part.new_zeros(self._arrived[number].ids.shape[0], part.shape[1]))
                self._add_to(self._sums[number], place, part)
        complete = self._complete(chunk)
        if chunk == len(self._blocks) - 1:
            self._arrived, self._sums = [], []
        return complete

    @staticmethod
    def _add_to(sums: Tensor, place: Tensor | None, part: Tensor) -> None:
        if place is None:
            sums += part
        else:
            sums.index_add_(0, place, part)  # every place once, so in no order

    def _complete(self, chunk: int) -> Tensor:
        complete, ranks = [], []
        for arrived, sums, ends in zip(self._arrived, self._sums, self._ends, strict=False):
            place = tokens_of((arrived.last == chunk).unsqueeze(0), sum(ends[chunk]))
            complete.append(sums.index_select(0, place))
            ranks.append(arrived.ranks.index_select(0, place))
        if len(complete) == 1:
            return complete[0]
        return torch.cat(complete).index_select(0, torch.cat(ranks).argsort(stable=True))


@dataclass(frozen=True)
class _Arrived:
    """The rows that one dispatch delivered.

    Attributes:
        hidden_states, ids, weights: `[N, ...]`, by rank and token.
        last: `[N]`, the chunk after which a row goes home.
        ranks: `[N]`, the rank that owns each row.
    """

    hidden_states: Tensor
    ids: Tensor
    weights: Tensor
    last: Tensor
    ranks: Tensor

    def rows(self, place: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, ids and weights at `place`; all if None."""
        if place is None:
            return self.hidden_states, self.ids, self.weights
        return tuple(each.index_select(0, place) for each in (self.hidden_states, self.ids, self.weights))  # type: ignore[return-value]


def tokens_of(hit: Tensor, rows: int) -> Tensor:
    """The token of every row.

    Args:
        hit: `[groups, T]` bool; rows are its true entries, group by group.
        rows: how many there are.
    """
    return _true_places(hit, rows)[:, 1]


def visits_of(hit: Tensor, visits: int, row_of_hit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The row of every visit in token order, and where each token's begin.

    Args:
        hit: `[groups, T]` bool.
        visits: how many of it are true.
        row_of_hit: `[groups, T]`, their rows; by default they lie group by group.
    """
    if row_of_hit is None:
        row_of_hit = (hit.flatten().cumsum(0) - 1).view_as(hit)
    by_token = hit.t()
    token, group = _true_places(by_token, visits).unbind(1)
    return row_of_hit[group, token], segment_offsets(by_token.sum(1))


def _true_places(mask: Tensor, count: int) -> Tensor:
    """`[count, 2]`, where `mask` is true, row by row; on CUDA without asking the device how many there are."""
    return mask.nonzero() if mask.device.type == "cpu" else torch.nonzero_static(mask, size=count)
