"""What a link really does: its round trip and its rate each way, measured over TCP."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from statistics import median

from serving.workbench.bench.link.network import Host
from serving.workbench.bench.link.tunnel import Speed

_ROUND_TRIPS = 30
_SECONDS = 0.4
_MOST_BYTES = 64 << 20
_BUFFER = bytearray(1 << 20)
_PATIENCE_S = 30.0


@dataclass(frozen=True)
class Probe:
    """Median round trip of one byte in microseconds, and Mbit/s from host 0 to host 1 and back."""

    round_trip_us: float
    forth_mbit: float
    back_mbit: float

    def __str__(self) -> str:
        return f"round trip {self.round_trip_us:.0f} us, {self.forth_mbit:.0f} and {self.back_mbit:.0f} Mbit/s"


def probe(hosts: tuple[Host, Host], speed: Speed) -> Probe:
    """Measure for about a second; `speed` says how much to send."""
    with hosts[1].entered():
        listener = socket.create_server((hosts[1].address, 0))
    with listener, hosts[0].entered():
        near = socket.create_connection(listener.getsockname(), timeout=_PATIENCE_S)
        far, _ = listener.accept()
    with near, far:
        far.settimeout(_PATIENCE_S)
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        size = int(min(_MOST_BYTES, _SECONDS * (speed.mbit or 1e6) * 1e6 / 8))
        return Probe(_round_trip(near, far) * 1e6, _rate(near, far, size), _rate(far, near, size))


def _round_trip(near: socket.socket, far: socket.socket) -> float:
    """Median seconds that a byte takes there and back."""

    def echo() -> None:
        for _ in range(_ROUND_TRIPS):
            far.send(far.recv(1))

    other = threading.Thread(target=echo)
    other.start()
    seconds = []
    for _ in range(_ROUND_TRIPS):
        start = time.perf_counter()
        near.send(b"x")
        near.recv(1)
        seconds.append(time.perf_counter() - start)
    other.join()
    return median(seconds)


def _rate(source: socket.socket, target: socket.socket, size: int) -> float:
    """Mbit/s of the second half of `size` bytes: TCP has found its pace then."""
    other = threading.Thread(target=source.sendall, args=(bytes(size),))
    other.start()
    received, half, start = 0, 0, 0.0
    while received < size:
        received += target.recv_into(_BUFFER)
        if not half and received >= size // 2:
            half, start = received, time.perf_counter()
    seconds = time.perf_counter() - start
    other.join()
    return (size - half) * 8e-6 / seconds if half < size else 0.0
