"""What a rank listens on, once all ranks have connected: nobody else can connect any more.

gloo listens on a port for each of its groups for as long as they live, accepts whoever connects, and keeps every such
connection for good. It has no authentication. So once the groups are made

    listening sockets    get a packet filter that drops everything: a stranger's connection is never made
    connections          of other users' processes on this machine are ended; if one was taken for a rank's, the group
                         fails as it does if a rank dies

Groups that are made later listen on ports of their own.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from serving.logs import log_event
from serving.network import admit_no_more

__all__ = ["refuse_strangers"]

_logger = logging.getLogger(__name__)

_CONNECTIONS = Path("/proc/net/tcp")
_ESTABLISHED = "01"


def refuse_strangers() -> None:
    """Refuse new connections to the sockets that this process listens on, and end those of other users."""
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") != "0":
        what = (
            "connections to the ports of gloo stay possible: with TORCH_GLOO_LAZY_INIT ranks connect when they need to"
        )
        log_event(_logger, what, level=logging.WARNING)
        return
    try:
        ended = 0
        for each in _sockets():
            with each:
                if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    admit_no_more(each)
                elif _is_of_another_user(each):
                    ended += 1
                    each.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        what = "connections to the ports of gloo stay possible, as the system offers no socket filters"
        log_event(_logger, what, level=logging.WARNING, error=error.strerror)
    else:
        if ended:
            what = "connections of other users' processes to the ports of gloo were ended"
            log_event(_logger, what, level=logging.WARNING, connections=ended)


def _sockets() -> Iterator[socket.socket]:
    """Copies of all TCP sockets of this process."""
    for link in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # it was closed meanwhile
            if not str(link.readlink()).startswith("socket:"):
                continue
            each = socket.socket(fileno=os.dup(int(link.name)))
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                yield each
            else:
                each.close()


def _is_of_another_user(connection: socket.socket) -> bool:
    """Whether the other end is a process of another user on this machine."""
    if connection.family != socket.AF_INET:
        return False
    with suppress(OSError):
        here, there = _as_listed(connection.getsockname()), _as_listed(connection.getpeername())
        for line in _CONNECTIONS.read_text().splitlines()[1:]:
            _, local, remote, state, _, _, _, owner, *_ = line.split()
            if (local, remote, state) == (there, here, _ESTABLISHED):
                return int(owner) != os.geteuid()
    return False


def _as_listed(address: tuple[str, int]) -> str:
    """An address as the kernel lists it: `0100007F:1F90`."""
    (number,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return f"{number:08X}:{address[1]:04X}"
