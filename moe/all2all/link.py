"""An emulated link of chosen latency and bandwidth, for ranks whose real transfers run at memory speed.

To show and measure overlap on one machine, a transfer is really launched, and then delivered no earlier than such a
link would deliver it. The link is full duplex and carries one transfer at a time per direction:

    start  = max(now, the direction's previous transfer has finished)
    finish = start + latency + bytes / bandwidth
    the transfer arrives at the later of its send's and its receive's finish

Waiting is sleeping: the emulated wire costs no CPU, as a network card's would not. Each rank reckons with its own
launch times; that a peer launched late shows through the real transfer underneath.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ubatch import ConfigError, LinkTime, Transfer

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


@dataclass
class _Direction:
    """One direction of the link. `free_at` moves on with every transfer; the rest counts since the last reset."""

    free_at: float = 0.0
    num_bytes: int = 0
    busy_s: float = 0.0

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
        self._send = _Direction()
        self._receive = _Direction()
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
            self._send = _Direction(self._send.free_at)
            self._receive = _Direction(self._receive.free_at)
            self._transfers = 0
        return past

    def _read(self) -> LinkStatistics:
        send, receive = self._send, self._receive
        return LinkStatistics(self._transfers, send.num_bytes, receive.num_bytes, send.busy_s, receive.busy_s)
