"""Carries the experts of one layer at a time between ranks, beside the steps: into staging, and from there into slots.

    gather    pieces of the slots' weights into a buffer, with a checksum behind every expert
    launch    on a channel of its own, over the host; nobody waits for it
    land      pieces into staging, on the device, and the checksums of what lies there
    unload    staging into the slots, in the order of the steps

Copies run on a stream beside the steps' own. The host only asks whether they are over.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from model_runner.balance.slots import ALIGNMENT, Ints, SlotStore, Stream, pieces_of, room_of, rounds_of, streams_of
from moe import EmulatedLink, ExpertMap, ExpertPlacement
from ubatch import CommGroup
from ubatch.ranks import SideChannel
from ubatch.streams import StreamBackend

_SUM_BYTES = ALIGNMENT
_MIXES = 6_364_136_223_846_793_005


class ChannelLost(Exception):
    """A transfer between ranks has failed, and with it the channel."""


@dataclass
class Layer:
    """One layer on its way.

    Attributes:
        number: of the layer.
        arriving: this rank's slots that change, in the order in which they lie in staging.
        table: this rank's next dispatch table, int32 on the device.
        num_bytes: between all ranks.
        work: goes on with the exchange; yields where something has to be waited for, and once in every round.
        rounds: those that have arrived.
        arrived: whether all have.
        staged: whether all has arrived, and is right.
    """

    number: int
    arriving: list[int]
    table: Tensor
    num_bytes: int
    work: Iterator[None] = field(init=False)
    rounds: int = 0
    arrived: bool = False
    staged: bool = False


class Carrier:
    """The buffers of one rank, and its channel to the others. Every rank of the group must make it.

    Args:
        slots: what moves.
        group: the ranks.
        device: of the weights.
        link: an emulated link to send over; None for the real one.
        streams: of the device.
        budget: most bytes that this rank sends, and receives, in a round.
        checksums: whether experts are checked when they have arrived.

    Attributes:
        nbytes: of the buffers.
        launches: rounds that were launched so far.
    """

    def __init__(
        self,
        slots: SlotStore,
        group: CommGroup,
        device: torch.device,
        link: EmulatedLink | None,
        streams: StreamBackend,
        budget: int,
        *,
        checksums: bool,
    ) -> None:
        self._slots, self._rank, self._device, self._link = slots, group.rank, device, link
        self._budget, self._checksums = budget, checksums
        room = room_of(budget, group.size)
        most = max(count * size for count, size in zip(slots.slots, slots.slot_bytes, strict=True))
        pinned = device.type == "cuda"
        self._staging = torch.empty(most, dtype=torch.uint8, device=device)
        self._out, self._into = (torch.zeros(room, dtype=torch.uint8, device=device) for _ in range(2))
        self._away, self._home = self._out, self._into  # on the host
        if device.type != "cpu":
            self._away, self._home = (torch.empty(room, dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
        self._factors = 2 * torch.arange(-(-room // ALIGNMENT), dtype=torch.int64, device=device) + 1
        self._products = torch.empty_like(self._factors)
        self.nbytes, self.launches = most + 4 * room, 0
        self._sums = torch.zeros(2, group.size, dtype=torch.int64, device=device)  # of what is sent, and received
        self._wrong = torch.zeros(1, dtype=torch.bool, device=device)
        self._wrong_home = torch.zeros(1, dtype=torch.bool, pin_memory=pinned)
        self._streams, self._side = streams, streams.new_stream()
        self._switched, self._gathered, self._landed = (streams.new_event() for _ in range(3))
        self._switched.record(streams.current())
        self.connect(group)

    def connect(self, group: CommGroup) -> None:
        """Make a new channel. Every rank of the group must call it; what was on its way is lost.

        Raises:
            RuntimeError: the ranks did not connect.
        """
        self._channel = SideChannel(group, None if self._link is None else self._link.beside)

    def load(self, number: int, before: ExpertPlacement, after: ExpertPlacement) -> Layer:
        """Begin with a layer; the one before has been unloaded, or was dropped at its end."""
        streams = streams_of(before, after, number)
        each = self._slots.slot_bytes[number] + _SUM_BYTES
        totals = np.array([[len(stream) * each for stream in row] for row in streams])
        arriving = [slot for row in streams for _, slot in row[self._rank]]
        num_bytes = int(totals.sum() - totals.trace())
        table = torch.from_numpy(after.dispatch_table(number, self._rank)).int()
        self._wrong_home.zero_()
        with self._beside():
            self._switched.wait(self._side)  # what is gathered is the placement in force, and staging is free
            layer = Layer(number, arriving, table.to(self._device), num_bytes)
            self._sums.zero_()
            self._wrong.zero_()
            self._landed.record(self._side)
        layer.work = self._exchange(layer, streams, totals)
        return layer

    def go_on(self, layer: Layer) -> bool:
        """Go on with a layer, without waiting; whether its exchange is over.

        Raises:
            ChannelLost: a transfer has failed.
        """
        next(layer.work, None)
        return layer.arrived

    def is_right(self) -> bool:
        """Whether all checksums of a layer whose exchange is over are right."""
        return not self._wrong_home

    def unload(self, layer: Layer, expert_map: ExpertMap) -> None:
        """Switch a layer: staging into the slots, and the table into the map, in the order of the current stream."""
        body, current = self._slots.slot_bytes[layer.number], self._streams.current()
        self._landed.wait(current)
        for place, slot in enumerate(layer.arriving):
            self._slots.write(layer.number, slot, self._staging[place * body : (place + 1) * body])
        expert_map.replace(layer.table)
        self._switched.record(current)

    def _exchange(self, layer: Layer, streams: list[list[Stream]], totals: Ints) -> Iterator[None]:
        """Yields where it would have to wait, and after each round's launch."""
        own = self._rank
        leaving, coming = streams[own], [row[own] for row in streams]
        first = [sum(map(len, coming[:rank])) for rank in range(len(coming))]  # of each sender, in staging
        for starts, sizes in rounds_of(totals, self._budget):
            with self._beside():
                self._gather(layer.number, leaving, starts[own], sizes[own])
            while not self._gathered.query():
                yield
            sent, received = sizes[own].tolist(), sizes[:, own].tolist()
            name = f"experts of layer {layer.number}"
            with _losing_channel():
                transfer = self._channel.launch(name, self._away, self._home, sent, received)
            self.launches += 1
            yield
            while not transfer.done():
                yield
            with _losing_channel():
                transfer.wait()
            with self._beside():
                self._land(layer.number, first, starts[:, own], sizes[:, own])
            while not self._landed.query():
                yield
            layer.rounds += 1
        layer.arrived = True

    def _gather(self, layer: int, streams: Sequence[Stream], starts: Ints, sizes: Ints) -> None:
        """Put this rank's pieces of a round together."""
        body, place = self._slots.slot_bytes[layer], 0
        for receiver, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
            for item, first, last in pieces_of(start, size, body + _SUM_BYTES):
                if first < body:
                    piece = self._out[place : place + min(last, body) - first]
                    self._slots.read(layer, streams[receiver][item][0], first, piece)
                    self._mix(self._sums[0, receiver], piece)
                if last > body:
                    at = place + body - first
                    self._out[at : at + _SUM_BYTES].view(torch.int64).copy_(self._sums[0, receiver])
                    self._sums[0, receiver] = 0
                place += last - first
        if self._away is not self._out:
            self._away[:place].copy_(self._out[:place], non_blocking=True)
        self._gathered.record(self._side)

    def _land(self, layer: int, firsts: Sequence[int], starts: Ints, sizes: Ints) -> None:
        """Copy the pieces of a round that have arrived into staging."""
        body, place = self._slots.slot_bytes[layer], 0
        if self._home is not self._into:
            total = int(sizes.sum())
            self._into[:total].copy_(self._home[:total], non_blocking=True)
        for sender, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
            for item, first, last in pieces_of(start, size, body + _SUM_BYTES):
                slot = (firsts[sender] + item) * body
                if first < body:
                    length = min(last, body) - first
                    piece = self._staging[slot + first : slot + first + length]
                    piece.copy_(self._into[place : place + length])
                    self._mix(self._sums[1, sender], piece)
                if last > body:
                    at = place + body - first
                    told = self._into[at : at + _SUM_BYTES].view(torch.int64)
                    self._wrong |= told != self._sums[1, sender]
                    self._sums[1, sender] = 0
                place += last - first
        self._wrong_home.copy_(self._wrong, non_blocking=True)
        self._landed.record(self._side)

    def _mix(self, total: Tensor, piece: Tensor) -> None:
        """Add a piece to a checksum: changes with every word of it, and with their order."""
        if self._checksums:
            words = piece.view(torch.int64)
            products = torch.mul(words, self._factors[: len(words)], out=self._products[: len(words)])
            total.mul_(_MIXES).add_(products.sum())

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Use the side stream."""
        outer = self._streams.current()
        self._streams.set_current(self._side)
        try:
            yield
        finally:
            self._streams.set_current(outer)


@contextmanager
def _losing_channel() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ChannelLost(str(error)) from error
