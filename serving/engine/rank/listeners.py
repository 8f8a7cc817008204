"""What a rank listens on, once all ranks have connected: nobody else can connect any more.

gloo listens on a port for each of its groups for as long as they live, accepts whoever connects, and keeps every such
connection for good. It has no authentication. So once the groups are made

    listening sockets    get a packet filter that drops everything: a stranger's connection is never made
    connections          of other users' processes on this machine are ended; if one was taken for a rank's, the group
                         fails as it does if a rank dies

Groups that are made later listen on ports of their own.
"""

import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from serving.logs import log_event
from serving.network import admit_no_more

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
        for each in _sockets():
            with each:
                if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    admit_no_more(each)
        ended = _end_strangers()  # only now: until then one more may have come
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


def _end_strangers() -> int:
    """End the connections whose other end is a process of another user on this machine; returns how many."""
    rows = [line.split() for line in _CONNECTIONS.read_text().splitlines()[1:]]
    owners = {(row[1], row[2]): int(row[7]) for row in rows if row[3] == _ESTABLISHED}
    ended = 0
    for each in _sockets():
        with each, suppress(OSError):  # it listens, or has ended meanwhile
            if each.family == socket.AF_INET:
                ends = _as_listed(each.getpeername()), _as_listed(each.getsockname())
                if owners.get(ends, os.geteuid()) != os.geteuid():
                    each.shutdown(socket.SHUT_RDWR)
                    ended += 1
    return ended


def _as_listed(address: tuple[str, int]) -> str:
    """An address as the kernel lists it: `0100007F:1F90`."""
    (number,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return f"{number:08X}:{address[1]:04X}"
