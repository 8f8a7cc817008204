"""Two hosts on one machine, joined by a link: network namespaces with a TUN device each, and what carries between them.

    host 0   10.88.0.1 (tun0) --- Tunnel --- 10.88.0.2 (tun0)   host 1

The namespaces are named by the process, `ubatch-link-PID-0` and `-1`, so that runs do not meet and a later one finds
what a killed one left behind: namespaces, and servers in them. The devices vanish with the process that opened them.

Two threads in C (`tunnel.c`) are the link: they change delay and rate under open connections. Python is too slow for
it: a gigabit is thousands of packets a second, and Python's threads wait for each other.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from serving.workbench.bench.statistics import on_cores
from ubatch import ConfigError
from ubatch.kernels import compile_c

_PRIORITY = 1
_END_S = 5.0


@dataclass(frozen=True)
class Speed:
    """Delay in microseconds and rate in Mbit/s, of each direction; a rate of 0 is unlimited. As text `500:600`."""

    delay_us: float
    mbit: float

    @classmethod
    def parse(cls, text: str) -> Speed:
        """Raises ValueError if the text is another."""
        delay, colon, rate = text.partition(":")
        try:
            speed = cls(float(delay), float(rate))
        except ValueError:
            colon, speed = "", cls(0, 0)
        if not colon or not (0 <= speed.delay_us < 1e6 and 0 <= speed.mbit < 1e6):
            raise ValueError(
                "expected DELAY:RATE, microseconds below a second and Mbit/s (0: unlimited), as in 500:600"
            )
        return speed

    def __str__(self) -> str:
        return f"{self.delay_us:g} us, {f'{self.mbit:g} Mbit/s' if self.mbit else 'unlimited'}"


class _Direction(ctypes.Structure):
    """As in `tunnel.c`."""

    _fields_ = (
        ("delay_ns", ctypes.c_int64),
        ("ns_per_byte", ctypes.c_double),
        ("ending", ctypes.c_int64),
        ("cut", ctypes.c_int64),
    )


class Tunnel:
    """Carries packets between two TUN devices, given by their open files, which it closes at the end.

    The threads have real-time priority where that is allowed: a network card does not wait for a core either.
    """

    def __init__(self, ends: tuple[int, int]) -> None:
        self._ends = ends
        self._directions = (_Direction(), _Direction())
        pairs = zip(ends, reversed(ends), self._directions, strict=True)
        self._threads = [threading.Thread(target=_carry, args=each, name="link", daemon=True) for each in pairs]
        for thread in self._threads:
            thread.start()

    def set(self, speed: Speed) -> None:
        """Change delay and rate of both directions; what is under way keeps its times."""
        for direction in self._directions:
            direction.delay_ns = int(speed.delay_us * 1e3)
            direction.ns_per_byte = 8e3 / speed.mbit if speed.mbit else 0.0

    def cut(self, *, cut: bool = True) -> None:
        """Lose all packets of both directions, or carry them again."""
        for direction in self._directions:
            direction.cut = cut

    def close(self) -> None:
        for direction in self._directions:
            direction.ending = 1
        for thread in self._threads:
            thread.join(_END_S)
        for end in self._ends:
            os.close(end)


@cache
def carrier() -> Any:
    """The loop in C. Raises ConfigError where nothing can be compiled."""
    source = Path(__file__).with_name("tunnel.c").read_text(encoding="utf-8")
    carry = compile_c(source, _GNU_SOURCE=1).ubatch_carry
    carry.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Direction))
    return carry


def _carry(source: int, target: int, direction: _Direction) -> None:
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    carrier()(source, target, ctypes.byref(direction))


# -- the hosts ---------------------------------------------------------------------------------------------------------


INTERFACE = "tun0"
_NAMESPACES = Path("/run/netns")
_NAME = re.compile(r"ubatch-link-(\d+)-[01]")
_DEVICE = Path("/dev/net/tun")
_MTU, _QUEUE = 1500, 1000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOAD = 0x01 | 0x02  # checksums, and TCP segmentation over IPv4
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    """A network namespace with an address on the link, and the core for its server."""

    name: str
    address: str
    core: int

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and the threads and processes that it starts, use this host's network."""
        with open("/proc/thread-self/ns/net", "rb") as before, open(_NAMESPACES / self.name, "rb") as own:
            _set_namespace(own.fileno())
            try:
                yield
            finally:
                _set_namespace(before.fileno())

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """As `entered`; and all runs on this host's core."""
        with self.entered(), on_cores({self.core}):
            yield


@dataclass(frozen=True)
class Network:
    """The two hosts, and the link between them."""

    hosts: tuple[Host, Host]
    link: Tunnel


@contextmanager
def network() -> Iterator[Network]:
    """Two hosts that a link without delay and limit joins; removed after the block.

    Raises:
        ConfigError: this machine or this user cannot have them; the message is one line.
    """
    _check()
    _remove_leftovers()
    cores = sorted(os.sched_getaffinity(0))
    hosts = tuple(
        Host(f"ubatch-link-{os.getpid()}-{number}", f"10.88.0.{number + 1}", cores[number % len(cores)])
        for number in (0, 1)
    )
    with ExitStack() as stack:
        for host in hosts:
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "delete", host.name)
        link = Tunnel((_open_device(hosts[0]), _open_device(hosts[1])))
        stack.callback(link.close)
        yield Network((hosts[0], hosts[1]), link)


def _check() -> None:
    if sys.platform != "linux" or not _DEVICE.exists() or shutil.which("ip") is None:
        raise ConfigError(f"it needs Linux with {_DEVICE} and iproute2 (`ip`), for a real link between two namespaces.")
    if os.geteuid() != 0:
        raise ConfigError(f"it needs root, for network namespaces and {_DEVICE}.")
    carrier()


def _open_device(host: Host) -> int:
    """A host's TUN device with its address, up; returns its open file."""
    with host.entered():
        device = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
        try:
            flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
            fcntl.ioctl(device, _TUNSETOFFLOAD, _OFFLOAD)
        except OSError as error:
            os.close(device)
            raise ConfigError(f"{_DEVICE} gives no device: {error.strerror}.") from error
        _ip("address", "add", f"{host.address}/24", "dev", INTERFACE)
        _ip("link", "set", INTERFACE, "mtu", str(_MTU), "txqueuelen", str(_QUEUE), "up")
        _ip("link", "set", "lo", "up")
        # A pause between two loads is no reason to start slowly again.
        Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")
    return device


def _remove_leftovers() -> None:
    """Remove the namespaces of processes that are gone, and end what still runs in them."""
    names = [each.name for each in _NAMESPACES.iterdir()] if _NAMESPACES.is_dir() else []
    for name in names:
        found = _NAME.fullmatch(name)
        if found is not None and not Path(f"/proc/{found[1]}").exists():
            for process in map(int, _ip("netns", "pids", name).split()):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            _ip("netns", "delete", name)
            print(f"removed {name}, which a killed run left behind", file=sys.stderr, flush=True)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"`ip {' '.join(words)}` fails: {done.stderr.strip()}")
    return done.stdout


def _set_namespace(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    if libc.setns(namespace, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise ConfigError(f"this thread cannot enter a network namespace: {os.strerror(number)}.")


# -- what a link really does: its round trip and its rate each way, measured over TCP ----------------------------------


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
