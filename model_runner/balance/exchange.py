"""Who sends which slot's weights to whom, and in which pieces. Every rank computes the same from the two placements.

streams     for every two ranks, the experts that one sends the other, one behind the other
rounds      pieces of all streams that travel together; no rank sends or receives more than a budget in one
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from moe import ExpertPlacement

Ints = npt.NDArray[np.int64]

Stream = list[tuple[int, int]]
"""Slots that travel from one rank to another: the slot on the sender, and the one on the receiver."""

ALIGNMENT = 8
"""Pieces of streams begin and end at multiples of so many bytes."""


def streams_of(before: ExpertPlacement, after: ExpertPlacement, layer: int) -> list[list[Stream]]:
    """The streams of a layer, `[sender][receiver]`; those of a rank to itself, too.

    A slot whose expert changes gets it from the receiver itself if that has it, else from the holder that sends least.
    """
    ranks, each = before.num_ranks, before.slots_per_rank
    old, new = (placement.experts[layer].reshape(ranks, each) for placement in (before, after))
    streams: list[list[Stream]] = [[[] for _ in range(ranks)] for _ in range(ranks)]
    sends = [0] * ranks
    of_expert: dict[int, dict[int, int]] = {}  # rank -> its first slot with the expert
    for rank, row in enumerate(old.tolist()):
        for place, expert in enumerate(row):
            of_expert.setdefault(expert, {}).setdefault(rank, place)
    for receiver, slot in np.argwhere(old != new).tolist():
        holders = of_expert[int(new[receiver, slot])]
        sender = receiver
        if receiver not in holders:
            sender = min(holders, key=lambda rank: (sends[rank], (rank - receiver) % ranks))
            sends[sender] += 1
        streams[sender][receiver].append((holders[sender], slot))
    return streams


def rounds_of(totals: Ints, budget: int) -> Iterator[tuple[Ints, Ints]]:
    """The rounds of all streams: where each stream's piece begins, and its bytes, both `[sender, receiver]`.

    Args:
        totals: `[R, R]`: bytes of each stream, multiples of `ALIGNMENT`.
        budget: most bytes that a rank sends others, or receives from them, in a round; and most that it copies.
    """
    done = np.zeros_like(totals)
    while (left := totals - done).any():
        others = (left > 0) & ~np.eye(len(left), dtype=bool)
        busiest = np.maximum(others.sum(axis=1)[:, None], others.sum(axis=0)[None, :])
        most = np.maximum(budget // np.maximum(busiest, 1) // ALIGNMENT, 1) * ALIGNMENT
        np.fill_diagonal(most, max(budget // ALIGNMENT, 1) * ALIGNMENT)
        sizes = np.minimum(left, most)
        yield done.copy(), sizes
        done += sizes


def room_of(budget: int, num_ranks: int) -> int:
    """Most bytes that a rank sends in a round of `rounds_of`, or receives, with its own."""
    return 2 * max(budget, ALIGNMENT * num_ranks)


def pieces_of(start: int, size: int, each: int) -> Iterator[tuple[int, int, int]]:
    """A piece of a stream, cut where items of `each` bytes end: item, and its first and last byte (exclusive)."""
    stop = start + size
    while start < stop:
        item, first = divmod(start, each)
        last = min(each, first + stop - start)
        yield item, first, last
        start += last - first
