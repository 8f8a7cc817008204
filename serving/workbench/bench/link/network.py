"""Two hosts on one machine, joined by a link: network namespaces with a TUN device each, and what carries between them.

    host 0   10.88.0.1 (tun0) --- Tunnel --- 10.88.0.2 (tun0)   host 1

The namespaces are named by the process, `ubatch-link-PID-0` and `-1`, so that runs do not meet and a later one finds
what a killed one left behind: namespaces, and servers in them. The devices vanish with the process that opened them.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from serving.workbench.bench.cores import on_cores
from serving.workbench.bench.link.tunnel import Tunnel, carrier
from ubatch import ConfigError

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
