"""Choose the addresses that a job's processes listen on: only those that its other processes need."""

import array
import ctypes
import fcntl
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from serving.logs import log_event
from ubatch import ConfigError

_logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""One instruction of classic BPF: take 0 bytes of the packet."""
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def listening_store(host: str, port: int, timeout: timedelta) -> tuple[dist.TCPStore, socket.socket]:
    """Start a rendezvous store that listens on one address; its `port` is the one to connect to.

    Args:
        host: an address or host name of this machine.
        port: 0 picks a free one.
        timeout: how long its `get` waits.

    Returns:
        The store, and a copy of the socket that it listens on.

    Raises:
        ConfigError: the address or port cannot be listened on.
    """
    try:
        family = _family_of(numeric_address(host))
        listener = socket.create_server((host, port), family=family)  # left alone, the store listens on every address
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} for the rendezvous ({error.strerror}). master_addr must be an address of "
            f"this machine, and master_port a free port."
        ) from error
    address, port = listener.getsockname()[:2]
    if ipaddress.ip_address(address).is_unspecified:
        listener.close()
        raise ConfigError(f"master_addr {host!r} is every address of this machine. Give the one that the others reach.")
    copy = listener.dup()
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
    return store, copy


def admit_no_more(listener: socket.socket) -> None:
    """Drop all packets of new connections to a listening socket; those that are open go on."""
    code = ctypes.create_string_buffer(_DROP_ALL)
    program = struct.pack("HP", len(_DROP_ALL) // 8, ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def warn_of_loopback(host: str) -> None:
    """Warn if the host name of node 0 resolves to loopback: `/etc/hosts` often does this for a machine's own name.

    A loopback address (not a name) gives no warning: the user chose it.
    """
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return
    with suppress(OSError):  # listening or connecting there fails later, with the reason
        if _is_loopback(address := numeric_address(host)):
            log_event(
                _logger,
                f"master_addr {host} is {address} on this machine, which no other machine reaches; give an address of "
                f"the network that the machines share",
                level=logging.WARNING,
            )


def numeric_address(host: str) -> str:
    """A host's first address, IPv4 or IPv6; raises OSError if it has none."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def choose_interface(master_addr: str, *, several: bool = False) -> None:
    """Make gloo and NCCL use the network interface that leads to node 0, unless the user has chosen one.

    By default gloo takes the address that the host's name resolves to: with several machines often an address that the
    others cannot reach, on a single machine often one that others can reach. An empty variable counts as no choice.

    Args:
        master_addr: address of node 0.
        several: whether there are several machines; with one, a failure is only a warning.

    Raises:
        ConfigError: with several machines, no interface of node 0's network can be chosen for gloo and NCCL.
    """
    interfaces = _interfaces()
    wanted = []
    for variable in _VARIABLES:
        if chosen := os.environ.get(variable):
            _log_choice(variable, chosen, interfaces, several)
        else:
            wanted.append(variable)
    if not wanted:
        return
    try:
        interface = _interface_towards(master_addr, interfaces)
    except ConfigError as error:
        if several:
            raise
        log_event(_logger, f"gloo and NCCL choose their interface themselves: {error}", level=logging.WARNING)
        return
    exactly = {"NCCL_SOCKET_IFNAME": f"={interface}"}  # without `=`, NCCL matches every name with this prefix
    os.environ.update({variable: exactly.get(variable, interface) for variable in wanted})


def _log_choice(variable: str, chosen: str, interfaces: Sequence[tuple[str, str]], several: bool) -> None:
    loopback = {name for name, address in interfaces if _is_loopback(address)}
    leaves = not several and not {each.removeprefix("=") for each in chosen.split(",")} <= loopback
    if leaves and (variable == "GLOO_SOCKET_IFNAME" or torch.cuda.is_available()):
        what = "interface chosen by the user: ranks listen there without authentication, though all are on this machine"
        log_event(_logger, f"{what}; unset it", level=logging.WARNING, variable=variable, interface=chosen)
    else:
        log_event(_logger, "interface chosen by the user", variable=variable, interface=chosen)


def _interface_towards(host: str, interfaces: Sequence[tuple[str, str]]) -> str:
    """The interface that packets to `host` leave from.

    Raises:
        ConfigError: there is none, or gloo would listen on the interface's first address, in another network.
    """
    how = "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that leads there."
    try:
        address = numeric_address(host)
        with socket.socket(_family_of(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: it only looks up the route
            own = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"no network interface leads to master_addr {host} ({error.strerror}). {how}") from error
    interface = next((name for name, address in interfaces if address == own), None)
    if interface is None:
        raise ConfigError(f"the network interface that leads to master_addr {host} is unknown. {how}")
    if ":" in own:
        return interface
    first = next(address for name, address in interfaces if name == interface)
    if ipaddress.ip_address(own) not in ipaddress.ip_network(f"{first}/{_netmask(interface)}", strict=False):
        raise ConfigError(
            f"master_addr {host} is reached from {own}, but gloo and NCCL take the first address of an interface, and "
            f"{interface} has {first} before it, in another network. Give {own} an interface of its own, or a label, "
            f"which is one to them (ip address add {own}/BITS dev {interface} label {interface}:1). If {first} is "
            f"meant, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to {interface}."
        )
    return interface


# Linux ioctls, because Python cannot list an interface's addresses. On other systems they fail and return nothing.
_SIOCGIFCONF, _SIOCGIFNETMASK = 0x8912, 0x891B
_IFREQ_BYTES = 16 + 24
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_MOST_INTERFACES = 4096


def _interfaces() -> list[tuple[str, str]]:
    """(name, address) in the kernel's order, IPv4 first; an interface has one entry per address or label."""
    answer = array.array("B", bytes(_MOST_INTERFACES * _IFREQ_BYTES))
    asked = struct.pack("iP", len(answer), answer.buffer_info()[0])
    told = _ioctl(_SIOCGIFCONF, asked)
    size = struct.unpack("iP", told)[0] if told is not None else 0
    rows = [answer[start : start + _IFREQ_BYTES].tobytes() for start in range(0, size, _IFREQ_BYTES)]
    return [(row[:16].partition(b"\0")[0].decode(), socket.inet_ntoa(row[20:24])) for row in rows] + _ipv6_interfaces()


def _ipv6_interfaces() -> list[tuple[str, str]]:
    try:
        rows = [line.split() for line in _IPV6_ADDRESSES.read_text().splitlines()]
    except OSError:
        return []
    return [(row[5], str(ipaddress.IPv6Address(int(row[0], 16)))) for row in rows]


def _netmask(interface: str) -> str:
    """Netmask of the interface's first address."""
    told = _ioctl(_SIOCGIFNETMASK, struct.pack("256s", interface.encode()[:15]))
    return "255.255.255.255" if told is None else socket.inet_ntoa(told[20:24])


def _ioctl(request: int, argument: bytes) -> bytes | None:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return fcntl.ioctl(probe.fileno(), request, argument)
    return None


def _family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
