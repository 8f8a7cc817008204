"""`emulated_link`: another back end, delivered over an `EmulatedLink`.

Such a link has a chosen latency and bandwidth, for ranks whose real transfers run at memory speed.

To show and measure overlap on one machine, a transfer is really launched, and then delivered no earlier than such a
link would deliver it. The link is full duplex and carries one transfer at a time per direction:

    start  = max(now, the direction's previous transfer has finished)
    finish = start + latency + bytes / bandwidth
    the transfer arrives at the later of its send's and its receive's finish

What travels beside the steps (`beside`), such as weights of experts, gives way: it is sent in packets, one at a time,
while the direction is free. A transfer waits for the packet that is on its way, and for no other.

Waiting is sleeping: the emulated wire costs no CPU, as a network card's would not. Each rank reckons with its own
launch times; that a peer launched late shows through the real transfer underneath.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from moe.all2all.base import All2All, All2AllTraits, BlockCombine
from moe.all2all.layouts import Dispatched
from moe.all2all.registry import make_all2all
from ubatch import CommGroup, ConfigError, ForwardMode, LinkTime, Transfer

T = TypeVar("T")


@dataclass(frozen=True)
class LinkStatistics:
    """What a link has carried.

    Attributes:
        transfers: how many crossed it.
        bytes_sent, bytes_received: payload in each direction.
        send_busy_s, receive_busy_s: seconds each direction was occupied, latencies included.
    """

    transfers: int
    bytes_sent: int
    bytes_received: int
    send_busy_s: float
    receive_busy_s: float

    @property
    def busy_s(self) -> float:
        """The communication time: what the busier direction needs if transfers follow each other without a gap."""
        return max(self.send_busy_s, self.receive_busy_s)


_PACKET_BYTES = 4 << 10
"""Of what gives way: the largest of a network card with RDMA, which interleaves them."""


class BesideWork:
    """Bytes that cross the link beside its transfers; see `ubatch.ranks.connection.Work`."""

    def __init__(self, go_on: Callable[[], float], left_s: Sequence[float]) -> None:
        self._go_on = go_on  # lets the link send what it can by now; returns the time
        self.launched = self.arrives = go_on()
        self.left_s = list(left_s)

    def is_completed(self) -> bool:
        """Whether the last packet has arrived."""
        now = self._go_on()
        return not any(self.left_s) and now >= self.arrives

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the last packet has arrived; False if it has not within `timeout`."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout.total_seconds()
        while not self.is_completed():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)
        return True


_LOOK_S = 0.001


@dataclass
class _Direction:
    """One direction of the link. `free_at` moves on with every transfer and packet; `beside` are those whose packets
    have not all been sent, in order; the rest counts since the last reset."""

    number: int
    free_at: float = 0.0
    num_bytes: int = 0
    busy_s: float = 0.0
    beside: deque[BesideWork] = field(default_factory=deque)

    def go_on(self, now: float, packet_s: float, latency_s: float) -> None:
        """Send the packets that began before `now`, in the time in which no transfer was on its way."""
        while self.beside:
            first = self.beside[0]
            start = max(self.free_at, first.launched)
            if start >= now:
                return
            left = first.left_s[self.number]
            took = min(left, math.ceil((now - start) / packet_s) * packet_s) if packet_s else left
            self.free_at = start + took
            first.left_s[self.number] = left - took
            if took == left:
                first.arrives = max(first.arrives, self.free_at + latency_s)
                self.beside.popleft()

    def occupy(self, now: float, num_bytes: int, duration_s: float) -> tuple[float, float]:
        """Reserve `duration_s` from the time at which the direction is free; returns start and finish."""
        start = max(now, self.free_at)
        self.free_at = start + duration_s
        self.count(num_bytes, duration_s)
        return start, self.free_at

    def count(self, num_bytes: int, duration_s: float) -> None:
        """Count what crosses, without reserving anything."""
        self.num_bytes += num_bytes
        self.busy_s += duration_s


class EmulatedLink:
    """One rank's full-duplex link, shared by all layers and lanes of the rank.

    Args:
        latency_s: seconds from a transfer's start to its first byte's arrival.
        bytes_per_s: bandwidth of each direction.
        clock: seconds; `time.monotonic`, on which transfers wait, unless a test only looks at deadlines.

    Raises:
        ConfigError: a negative latency, or no bandwidth.
    """

    def __init__(self, latency_s: float, bytes_per_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not latency_s >= 0:
            raise ConfigError(f"latency_s must be at least 0, not {latency_s}.")
        if not bytes_per_s > 0:
            raise ConfigError(f"bytes_per_s must be positive, not {bytes_per_s}; float('inf') for latency alone.")
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._send, self._receive = _Direction(0), _Direction(1)
        self._transfers = 0
        self._at_once = False

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, what is launched is delivered as soon as the real transfer is through.

        Statistics and traces still say how long each transfer occupies the link. What a rank computes is measured so:
        a core that sleeps until a deadline is slower for a while when it wakes.
        """
        outer, self._at_once = self._at_once, True
        try:
            yield
        finally:
            self._at_once = outer

    def carry(self, transfer: Transfer[T]) -> Transfer[T]:
        """Put a launched transfer on the link: it is delivered no earlier than the link allows.

        A direction in which nothing crosses is not occupied; a transfer that stays on its rank passes at once.
        """
        with self._lock:
            now = self._clock()
            self._go_on(now)
            directions, sizes = (self._send, self._receive), (transfer.bytes_sent, transfer.bytes_received)
            durations = [self.latency_s + size / self.bytes_per_s if size else 0.0 for size in sizes]
            if self._at_once and any(sizes):
                for direction, size, duration in zip(directions, sizes, durations, strict=True):
                    direction.count(size, duration)
                self._transfers += 1
                transfer.delay_until(0.0, link=LinkTime(*durations))
                return transfer
            spans = [
                direction.occupy(now, size, duration)
                for direction, size, duration in zip(directions, sizes, durations, strict=True)
                if size
            ]
            if spans:
                self._transfers += 1
                start, finish = min(start for start, _ in spans), max(finish for _, finish in spans)
                transfer.delay_until(finish, started=start, link=LinkTime(*durations))
        return transfer

    def beside(self, bytes_sent: int, bytes_received: int) -> BesideWork:
        """Put bytes on the link that give way to all transfers, also to later ones. Statistics do not count them."""
        sizes = (0, 0) if self._at_once else (bytes_sent, bytes_received)
        work = BesideWork(self._go_on_now, [size / self.bytes_per_s for size in sizes])
        with self._lock:
            for direction in (self._send, self._receive):
                if work.left_s[direction.number]:
                    direction.beside.append(work)
        return work

    def _go_on_now(self) -> float:
        with self._lock:
            now = self._clock()
            self._go_on(now)
        return now

    def _go_on(self, now: float) -> None:
        """Send the packets of what gives way that have begun by now."""
        for direction in (self._send, self._receive):
            direction.go_on(now, _PACKET_BYTES / self.bytes_per_s, self.latency_s)

    def signal(self, transfer: Transfer[T]) -> Transfer[T]:
        """Put a few bytes for the host, such as counts, on the link: they pay the latency alone.

        Packets of a small message slip in between those of a payload, so it neither queues nor occupies the link.
        """
        if (transfer.bytes_sent or transfer.bytes_received) and not self._at_once:
            transfer.delay_until(self._clock() + self.latency_s)
        return transfer

    def statistics(self) -> LinkStatistics:
        """What was carried since the link was made, or since `reset_statistics`."""
        with self._lock:
            return self._read()

    def reset_statistics(self) -> LinkStatistics:
        """Count from zero again; returns what was counted until now. Transfers under way are not disturbed."""
        with self._lock:
            past = self._read()
            for direction in (self._send, self._receive):
                direction.num_bytes, direction.busy_s = 0, 0.0
            self._transfers = 0
        return past

    def _read(self) -> LinkStatistics:
        send, receive = self._send, self._receive
        return LinkStatistics(self._transfers, send.num_bytes, receive.num_bytes, send.busy_s, receive.busy_s)


class EmulatedLinkAll2All(All2All[Any]):
    """Launches through another back end; the link decides when it arrives.

    Args:
        link: one per rank, shared by everything that communicates.
        inner: the back end that really moves the data.

    Raises:
        ConfigError: there is no link, or `inner` is this back end or unknown.
    """

    may_signal: ClassVar[bool] = True

    def __init__(
        self,
        *,
        group: CommGroup | None,
        num_experts: int,
        link: EmulatedLink,
        inner: str = "torch_dist",
        **options: object,
    ) -> None:
        if not isinstance(link, EmulatedLink):
            raise ConfigError(f"link must be an EmulatedLink, not {type(link).__name__}.")
        if inner == "emulated_link":
            raise ConfigError("emulated_link cannot wrap itself; give `inner` the back end that moves the data.")
        self.link = link
        self.inner = make_all2all(inner, group=group, num_experts=num_experts, **options)
        self.inner.on_counts = link.signal
        self.num_experts, self.experts = self.inner.num_experts, self.inner.experts

    @property
    def traits(self) -> All2AllTraits:  # type: ignore[override]
        """The inner back end's traits, but without signals: the link cannot delay what a device signals."""
        return _without_signals(self.inner.traits)

    def traits_for(self, mode: ForwardMode, tokens: int) -> All2AllTraits:
        """See `All2All`."""
        return _without_signals(self.inner.traits_for(mode, tokens))

    def inputs_ready(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]) -> None:
        self.inner.inputs_ready(x, topk_ids, topk_weights, blocks)

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Any]:
        """See `All2All`. Where the host waits for counts first, those take the link's latency too."""
        transfer: Transfer[Any] = self.inner.dispatch(x, topk_ids, topk_weights)
        return self.link.carry(transfer)

    def dispatch_chunks(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]
    ) -> Sequence[Transfer[Any]]:
        """See `All2All`. One after the other on the link."""
        return [self.link.carry(each) for each in self.inner.dispatch_chunks(x, topk_ids, topk_weights, blocks)]

    def dispatch_cut(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, blocks: Sequence[range]
    ) -> Transfer[Sequence[Any]]:
        return self.link.carry(self.inner.dispatch_cut(x, topk_ids, topk_weights, blocks))

    def combine(self, y: Tensor, handle: Any) -> Transfer[Tensor]:
        return self.link.carry(self.inner.combine(y, handle))

    def dispatch_blocks(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Dispatched[Any]]:
        return self.link.carry(self.inner.dispatch_blocks(x, topk_ids, topk_weights))

    def combine_blocks(self, handle: Any) -> BlockCombine:
        return _LinkedBlocks(self.inner.combine_blocks(handle), self.link)


@dataclass(frozen=True)
class _LinkedBlocks:
    """See `BlockCombine`."""

    inner: BlockCombine
    link: EmulatedLink

    @property
    def blocks(self) -> Sequence[range]:
        return self.inner.blocks

    def send(self, y: Tensor) -> Transfer[Tensor]:
        return self.link.carry(self.inner.send(y))

    def sum_up(self, arrived: Sequence[Tensor]) -> Tensor:
        return self.inner.sum_up(arrived)


def _without_signals(traits: All2AllTraits) -> All2AllTraits:
    return replace(traits, signals=False) if traits.signals else traits
