"""Small messages between ranks of one machine: a Unix socket for every two ranks, in place of gloo.

For a few kilobytes gloo needs more CPU than a small layer computes: every collective wakes two threads, and every
message takes three packets. Here the thread that launches an exchange writes to the sockets, and the thread that waits
for it reads. A message is one packet, which arrives whole:

    channel | number | mark | rows    number: of the exchange in its channel
                                      mark: of what is exchanged; another one than expected is an error

    launched before it arrives        it is copied into place by whoever waits
    arrives before the launch         it is kept until then
    the socket is full                it is kept, and sent by whoever waits

The sockets lie in a folder that only this user can enter, and that is removed when all ranks are connected. Ranks in
different network namespaces are not near, because between them there may be a slower link.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from pathlib import Path

from torch import Tensor

from ubatch.process.machine import machine_name

MOST_BYTES = 32 << 10
"""Most bytes of a message. A larger one travels in the background with gloo, beside the compute."""
_BUFFER_BYTES = 1 << 20
_logger = logging.getLogger(__name__)
_HEAD = struct.Struct("=qqq")
_SLICE_S = 0.05
"""Longest time that a waiting thread keeps another one from reading."""


class Channel(IntEnum):
    """Exchanges of one channel are launched in the same order on all ranks."""

    DATA = 0
    VOTES = 1


class NearWork:
    """An exchange; see `ubatch.ranks.connection.Work`.

    Attributes:
        keep: tensors whose memory it reads and writes.
        mark: see the module.
        missing: packets that have not arrived here, or not left.
        error: why it failed, or None.
    """

    error: str | None = None

    def __init__(self, ranks: NearRanks, keep: tuple[Tensor, ...], mark: int) -> None:
        self._ranks = ranks
        self.keep = keep
        self.mark = mark
        self.missing = 0

    def is_completed(self) -> bool:
        """Whether it has ended, with or without an error."""
        if self.missing and self._ranks.reading.acquire(blocking=False):
            try:
                while self._ranks.read(0):
                    pass
            finally:
                self._ranks.reading.release()
        return not self.missing

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait without using the CPU.

        Raises:
            RuntimeError: it failed, or is not over within `timeout`.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout.total_seconds()
        while self.missing:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise RuntimeError(f"the exchange was not over within {timeout}")
            with self._ranks.reading:
                if self.missing:  # no other thread has read it meanwhile
                    self._ranks.read(min(remaining, _SLICE_S))
        if self.error is not None:
            raise RuntimeError(self.error)
        return True

    def fail(self, why: str) -> None:
        """End with an error."""
        self.error, self.missing = why, 0


_Key = tuple[int, int]
"""Channel and number of an exchange."""


@dataclass(slots=True)
class _Peer:
    """Another rank.

    Attributes:
        name: for errors.
        posted: where packets go that have not arrived.
        early: packets that arrived before their exchange was launched here.
        unsent: packets for which the socket had no room.
        lost: why nothing can be exchanged with it any more, or None.
    """

    name: str
    socket: socket.socket
    posted: dict[_Key, tuple[memoryview, NearWork]] = field(default_factory=dict)
    early: dict[_Key, tuple[bytes, int]] = field(default_factory=dict)
    unsent: deque[tuple[bytes, memoryview, NearWork]] = field(default_factory=deque)
    lost: str | None = None


class NearRanks:
    """The sockets to the other ranks of a group.

    Args:
        sockets: one for every rank, in group order; None for this one.

    Attributes:
        reading: held by the thread that calls `read`.
    """

    def __init__(self, sockets: Sequence[socket.socket | None]) -> None:
        self._peers: list[_Peer | None] = []
        self._by_fd: dict[int, _Peer] = {}
        self._any_lost = False
        self._launched = dict.fromkeys(Channel, 0)
        self._packet = memoryview(bytearray(_HEAD.size + MOST_BYTES))
        self._state = threading.Lock()  # never held while a thread waits
        self.reading = threading.Lock()
        self._poll = select.poll()
        for rank, each in enumerate(sockets):
            peer = None if each is None else _Peer(f"rank {rank} of the group", each)
            self._peers.append(peer)
            if peer is not None:
                peer.socket.setblocking(False)
                self._by_fd[peer.socket.fileno()] = peer
                self._poll.register(peer.socket, select.POLLIN)

    def exchange(
        self,
        channel: Channel,
        source: Tensor,
        result: Tensor,
        sent: Sequence[int] | None,
        received: Sequence[int],
        row_bytes: int,
        mark: int = 0,
    ) -> NearWork:
        """Send every rank rows of `source`, and receive rows of `result` from every rank.

        Args:
            source, result: contiguous, on the CPU.
            sent: how many rows each rank is sent, in the order in which they lie; None sends all rows to each.
            received: how many rows each rank sends. None at all are no message.
            row_bytes: bytes of a row. No message is longer than `MOST_BYTES`.
            mark: of what is exchanged, equal on all ranks.
        """
        work = NearWork(self, (source, result), mark)
        out, into = _bytes_of(source, result)
        away = back = 0
        with self._state:
            key = channel, self._launched[channel]
            self._launched[channel] += 1
            head = _HEAD.pack(*key, mark)
            for rank, peer in enumerate(self._peers):
                ours = out if sent is None else out[away : away + sent[rank] * row_bytes]
                theirs = into[back : back + received[rank] * row_bytes]
                away, back = away + len(ours), back + len(theirs)
                if peer is None:
                    theirs[:] = ours
                    continue
                if ours and (peer.unsent or not self._sent(peer, head, ours)):
                    peer.unsent.append((head, ours, work))
                    work.missing += 1
                    self._poll.modify(peer.socket, select.POLLIN | select.POLLOUT)
                if theirs and key in peer.early:
                    _deliver(*peer.early.pop(key), theirs, peer, work)
                elif theirs:
                    peer.posted[key] = theirs, work
                    work.missing += 1
            if self._any_lost:
                self._fail_without(key, work, sent, received)
        return work

    def read(self, limit_s: float) -> bool:
        """Wait for packets, or for room to send, and handle them; returns whether there was anything."""
        ready = self._poll.poll(limit_s * 1e3)
        with self._state:
            for fd, event in ready:
                peer = self._by_fd[fd]
                if event & select.POLLOUT:
                    self._send_on(peer)
                try:
                    size = peer.socket.recv_into(self._packet)
                except BlockingIOError:
                    continue
                except OSError as error:
                    self._lose(peer, f"{peer.name}: {error}")
                    continue
                if size == 0:
                    self._lose(peer, f"{peer.name} closed its connection")
                    continue
                channel, number, mark = _HEAD.unpack_from(self._packet)
                key, packet = (channel, number), self._packet[_HEAD.size : size]
                if key not in peer.posted:
                    peer.early[key] = bytes(packet), mark
                    continue
                into, work = peer.posted.pop(key)
                if work.error is None:
                    work.missing -= 1
                    _deliver(packet, mark, into, peer, work)
        return bool(ready)

    def stop(self) -> None:
        """End all exchanges with an error on this rank. The other ranks do not notice."""
        with self._state:
            for peer in filter(None, self._peers):
                self._lose(peer, "the connection was given up")

    def close(self) -> None:
        """Close the sockets. The other ranks notice it when they wait for this one."""
        self.stop()
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close the sockets in a forked process: only its parent's count as this rank's."""
        for peer in filter(None, self._peers):
            peer.socket.close()

    # -- with `_state` held ---------------------------------------------------------------------------------------

    def _sent(self, peer: _Peer, head: bytes, rows: memoryview) -> bool:
        """Send a packet; False where the socket has no room. An error loses the peer."""
        try:
            peer.socket.sendmsg((head, rows))
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(peer, f"{peer.name}: {error}")
        return True

    def _send_on(self, peer: _Peer) -> None:
        while peer.unsent:
            head, rows, work = peer.unsent[0]
            if not self._sent(peer, head, rows):
                return
            if peer.lost is None:
                peer.unsent.popleft()
                work.missing -= 1
        if peer.lost is None:
            self._poll.modify(peer.socket, select.POLLIN)

    def _lose(self, peer: _Peer, why: str) -> None:
        if peer.lost is not None:
            return
        peer.lost, self._any_lost = why, True
        while peer.posted:
            peer.posted.popitem()[1][1].fail(why)
        while peer.unsent:
            peer.unsent.pop()[2].fail(why)
        self._poll.unregister(peer.socket)

    def _fail_without(self, key: _Key, work: NearWork, sent: Sequence[int] | None, received: Sequence[int]) -> None:
        """Fail an exchange with a lost peer."""
        for rank, peer in enumerate(self._peers):
            if peer is not None and peer.lost is not None and (sent is None or sent[rank] or received[rank]):
                peer.posted.pop(key, None)
                work.fail(peer.lost)


def _bytes_of(*tensors: Tensor) -> list[memoryview]:
    views = []
    for x in tensors:
        array = (ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr() or 1)  # the address of no bytes is never read
        views.append(memoryview(array).cast("B"))
    return views


def _deliver(packet: bytes | memoryview, mark: int, into: memoryview, peer: _Peer, work: NearWork) -> None:
    if mark == work.mark and len(packet) == len(into):
        into[:] = packet
    else:
        what = "something else" if mark != work.mark else f"{len(packet)} bytes in place of {len(into)}"
        work.fail(f"{peer.name} sent {what}: the ranks launch in different orders")


# -- connecting ----------------------------------------------------------------------------------------------------


def connect_near(own: int, count: int, tell: Callable[[str], Sequence[str]], timeout_s: float) -> NearRanks | None:
    """Connect `count` ranks; None if they are not all on one machine. Every rank must call it.

    Args:
        own: this rank's place among them.
        tell: gives every rank's text, in order, for this rank's, of at most 250 bytes.
        timeout_s: how long it may take.

    Raises:
        RuntimeError: a rank did not connect within the time-out.
    """
    with ExitStack() as stack:
        listener, path = _listen(stack, count)
        place = f"{machine_name()} {_network()}"
        told = [each.split("\n") for each in tell(f"{place}\n{path}")]
        paths = [each[1] for each in told]
        together = all(each[0] == place for each in told)
        if "no" in tell("yes" if together and all(map(_is_ours, paths)) else "no") or listener is None:
            if together:
                _logger.warning(
                    "the ranks of this machine exchange small messages over gloo, which costs more CPU: not every one "
                    "can reach a socket in the others' folder for temporary files (%s; TMPDIR).",
                    tempfile.gettempdir(),
                )
            return None
        try:
            return NearRanks(_connected(own, listener, paths, timeout_s))
        except OSError as error:
            raise RuntimeError(f"the ranks of this machine could not connect: {error}") from error


def _listen(stack: ExitStack, count: int) -> tuple[socket.socket | None, str]:
    """A listening socket and its path, both for the time of `stack`; None and an empty path where there can be none."""
    try:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ubatch-", ignore_cleanup_errors=True))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        path = str(Path(folder, "rank"))
        listener.bind(path)
        listener.listen(count)
    except (OSError, AttributeError):  # no such sockets on this system, no folder to write in, or its name is too long
        return None, ""
    return listener, path


def _network() -> int:
    """The network namespace; 0 where there are none."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return 0


def _is_ours(path: str) -> bool:
    """Whether it is a file of this user's: a container may have other files under the same path."""
    try:
        return os.stat(path).st_uid == os.getuid()
    except OSError:
        return False


def _connected(own: int, listener: socket.socket, paths: Sequence[str], timeout_s: float) -> list[socket.socket | None]:
    """A socket to every other rank: to those before this one, and from those behind it."""
    sockets: list[socket.socket | None] = [None] * len(paths)
    for rank in range(own):
        sockets[rank] = each = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        each.settimeout(timeout_s)
        each.connect(paths[rank])
        each.send(str(own).encode())
    listener.settimeout(timeout_s)
    while None in sockets[own + 1 :]:
        each, _ = listener.accept()
        each.settimeout(timeout_s)
        rank = int(each.recv(16))
        sockets[rank] = each
    for made in filter(None, sockets):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return sockets
