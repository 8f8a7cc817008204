"""Which of this machine's addresses the processes of a job listen on: no more than the other ones need."""

from __future__ import annotations

import logging
import os
import socket
import struct
from datetime import timedelta

import torch.distributed as dist

from serving.logs import log_event
from ubatch import ConfigError

__all__ = ["LOOPBACK", "choose_interface", "listening_store"]

_logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def listening_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Start a rendezvous store that listens on one address; its `port` is the one to connect to.

    Args:
        host: an address of this machine, or a name of one.
        port: 0 picks a free one.
        timeout: how long its `get` waits.

    Raises:
        ConfigError: the address or port cannot be listened on.
    """
    try:
        listener = socket.create_server((host, port))  # left alone, the store listens on every address
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} for the rendezvous ({error.strerror}). master_addr must be an address of "
            f"this machine, and master_port a free port."
        ) from error
    address, port = listener.getsockname()
    if address == "0.0.0.0":
        listener.close()
        raise ConfigError(f"master_addr {host!r} is every address of this machine. Give the one that the others reach.")
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )


def choose_interface(master_addr: str) -> None:
    """Let gloo and NCCL use the network interface that leads to node 0, where the user has not chosen one.

    Left alone, gloo takes the address that the host's name resolves to: often one that no other machine reaches, or on
    a single machine one that others reach.
    """
    wanted = []
    for variable in _VARIABLES:
        if variable in os.environ:
            log_event(_logger, "interface chosen by the user", variable=variable, interface=os.environ[variable])
        else:
            wanted.append(variable)
    if not wanted:
        return
    interface = _interface_towards(master_addr)
    if interface is None:
        log_event(
            _logger,
            f"the interface that leads to {master_addr} is unknown, so gloo and NCCL choose one; set the variables",
            level=logging.WARNING,
            variables=" ".join(wanted),
        )
        return
    exactly = {"NCCL_SOCKET_IFNAME": f"={interface}"}  # without `=`, NCCL takes every name that begins so
    os.environ.update({variable: exactly.get(variable, interface) for variable in wanted})


def _interface_towards(host: str) -> str | None:
    """The interface whose address packets to `host` carry; None where it cannot be told."""
    try:
        import fcntl
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing: it only looks up the route
        except OSError:
            return None
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue  # no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
