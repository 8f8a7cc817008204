"""The weights of a rank's slots, as bytes: of any experts back end, in whatever layout its kernels want. And who sends
which slot's weights to whom, and in which pieces: every rank computes the same from the two placements.

streams     for every two ranks, the experts that one sends the other, one behind the other
rounds      pieces of all streams that travel together; no rank sends or receives more than a budget in one
"""

import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe import ExpertPlacement, FusedExperts
from ubatch import ConfigError

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


class SlotStore:
    """Every slot's weights in every MoE layer. A slot's bytes are its rows of all tensors, one behind the other, each
    filled up to a multiple of `ALIGNMENT`.

    Args:
        experts: of every MoE layer.

    Attributes:
        slots: slots with weights, of each layer.
        slot_bytes: bytes of a slot, of each layer.
        layout: a hash of layouts, equal on ranks whose slots can change places.

    Raises:
        ConfigError: a back end does not tell its layout, or keeps weights that are not one row per expert.
    """

    def __init__(self, experts: Sequence[FusedExperts]) -> None:
        self._rows = [_rows_of(each) for each in experts]
        self.slots = [len(each.expert_range) for each in experts]
        self._starts = [list(accumulate((_filled(rows.shape[1]) for rows in layer), initial=0)) for layer in self._rows]
        self.slot_bytes = [starts[-1] for starts in self._starts]
        kinds = [
            (type(each).__name__, each.dtype, [(*tensor.shape[1:], tensor.dtype) for tensor in each.slot_tensors()])
            for each in experts
        ]
        self.layout = zlib.crc32(repr(kinds).encode())

    def read(self, layer: int, slot: int, start: int, into: Tensor) -> None:
        """Copy a slot's bytes from `start` on, in the order of the current stream.

        Args:
            into: `[N]` uint8 on the experts' device; the bytes between two tensors are not written.
        """
        stop = start + len(into)
        for rows, first in zip(self._rows[layer], self._starts[layer], strict=False):
            begin, end = max(start, first), min(stop, first + rows.shape[1])
            if begin < end:
                into[begin - start : end - start].copy_(rows[slot, begin - first : end - first])

    def write(self, layer: int, slot: int, source: Tensor) -> None:
        """Replace a slot's bytes, in the order of the current stream.

        Args:
            source: `[slot_bytes]` uint8 on the experts' device.
        """
        for rows, first in zip(self._rows[layer], self._starts[layer], strict=False):
            rows[slot].copy_(source[first : first + rows.shape[1]])


def _rows_of(experts: FusedExperts) -> list[Tensor]:
    """The bytes of each tensor, `[E_local, N]`: views."""
    held = len(experts.expert_range)
    rows = []
    for tensor in experts.slot_tensors():
        if tensor.dim() < 1 or tensor.shape[0] != held or not tensor.is_contiguous():
            raise ConfigError(
                f"{type(experts).__name__} keep a tensor {list(tensor.shape)} that is not one contiguous row for each "
                f"of {held} experts, so experts cannot move. Use another experts back end, or no --enable-eplb."
            )
        rows.append(tensor.detach().view(held, -1).view(torch.uint8))
    return rows


def _filled(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
