"""Small messages between ranks of one machine: a Unix socket for every two ranks, in place of gloo.

For a few kilobytes gloo needs more CPU than a small layer computes: every collective wakes two threads, and every
message takes three packets. Here the thread that launches an exchange writes to the sockets, and the thread that waits
for it reads. A message is one packet, or more if it is long:

    channel | number | mark | bytes | rows      number: of the launch in its channel
                                                mark: of what is exchanged
                                                bytes: of the whole message

    launched before it arrives        it is copied into place by whoever waits
    arrives before the launch         it is kept until then
    the socket is full                it is kept, and sent by whoever waits
    not what is expected              `OtherLaunch`: the ranks launch in different orders

The sockets lie in a folder that only this user can enter, and that is removed when all ranks are connected. Ranks in
different network namespaces are not near, because between them there may be a slower link.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
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

from ubatch.process.machine import machine_name

MOST_BYTES = 32 << 10
"""Most bytes of a packet. What is known to be longer travels in the background with gloo, beside the compute."""
_BUFFER_BYTES = 1 << 20
_logger = logging.getLogger(__name__)
_HEAD = struct.Struct("=qqqq")
_SLICE_S = 0.02
"""Longest time that a thread waits for a packet that another thread has read."""


class OtherLaunch(RuntimeError):
    """A rank sent something else than this one expects."""


class Channel(IntEnum):
    """Launches of one channel are in the same order on all ranks."""

    DATA = 0
    VOTES = 1


class NearWork:
    """An exchange; see `ubatch.ranks.connection.Work`.

    Attributes:
        keep: whatever owns the memory that it reads and writes.
        missing: messages that have not arrived here, and packets that have not left.
        error: why it failed, or None.
    """

    error: RuntimeError | None = None

    def __init__(self, ranks: NearRanks, keep: object) -> None:
        self._ranks = ranks
        self.keep = keep
        self.missing = 0

    def is_completed(self) -> bool:
        """Whether it has ended, with or without an error."""
        while self.missing and self.error is None and self._ranks.read(0):
            pass
        return not self.missing or self.error is not None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait without using the CPU.

        Raises:
            RuntimeError: it failed, or is not over within `timeout`. `OtherLaunch`, if a rank sent something else.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout.total_seconds()
        while self.missing and self.error is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise RuntimeError(f"the exchange was not over within {timeout}")
            self._ranks.read(min(remaining, _SLICE_S))
        if self.error is not None:
            raise self.error
        return True


_Key = tuple[int, int]
"""Channel and number of a launch."""


@dataclass(slots=True)
class _Peer:
    """Another rank.

    Attributes:
        name: for errors.
        posted: of messages that are expected: where the rest of each goes, its mark, and the exchange.
        early: of messages whose exchange was not launched here yet: what has arrived, their marks and sizes.
        unsent: packets that were not sent yet.
        full: whether it waits for room in the socket.
        lost: why nothing can be exchanged with it any more, or None.
    """

    name: str
    socket: socket.socket
    posted: dict[_Key, tuple[memoryview, int, NearWork]] = field(default_factory=dict)
    early: dict[_Key, tuple[bytearray, int, int]] = field(default_factory=dict)
    unsent: deque[tuple[bytes, memoryview, NearWork]] = field(default_factory=deque)
    full: bool = False
    lost: RuntimeError | None = None


class NearRanks:
    """The sockets to the other ranks of a group.

    Args:
        sockets: one for every rank, in group order; None for this one.
    """

    def __init__(self, sockets: Sequence[socket.socket | None]) -> None:
        self._peers: list[_Peer | None] = []
        self._by_fd: dict[int, _Peer] = {}
        self._launched = dict.fromkeys(Channel, 0)
        self._packet = memoryview(bytearray(_HEAD.size + MOST_BYTES))
        self._state = threading.Lock()  # never held while a thread waits
        self._epoll = select.epoll()  # several threads may wait on it at once
        for rank, each in enumerate(sockets):
            peer = None if each is None else _Peer(f"rank {rank} of the group", each)
            self._peers.append(peer)
            if peer is not None:
                peer.socket.setblocking(False)
                self._by_fd[peer.socket.fileno()] = peer
                self._epoll.register(peer.socket, select.EPOLLIN)

    def pass_by(self, channel: Channel) -> None:
        """Count a launch that goes another way."""
        with self._state:
            self._launched[channel] += 1

    def exchange(
        self,
        channel: Channel,
        out: memoryview,
        into: memoryview,
        sent: Sequence[int] | None,
        received: Sequence[int],
        row_bytes: int,
        *,
        mark: int = 0,
        keep: object = None,
    ) -> NearWork:
        """Send rows to every rank, and receive rows from every rank.

        Args:
            out, into: the rows, as bytes.
            sent: how many rows of `out` each rank is sent, in the order in which they lie; None sends all to each.
            received: how many rows each rank sends. None at all are no message.
            row_bytes: bytes of a row.
            mark: of what is exchanged, equal on all ranks.
            keep: whatever owns the memory of `out` and `into`.
        """
        work = NearWork(self, keep)
        away = back = 0
        with self._state:
            key = channel, self._launched[channel]
            self._launched[channel] += 1
            for rank, peer in enumerate(self._peers):
                ours = out if sent is None else out[away : away + sent[rank] * row_bytes]
                theirs = into[back : back + received[rank] * row_bytes]
                away, back = away + len(ours), back + len(theirs)
                if peer is None:
                    theirs[:] = ours
                    continue
                if peer.lost is None:
                    for start in range(0, len(ours), MOST_BYTES):
                        head = _HEAD.pack(*key, mark, len(ours) - start)
                        peer.unsent.append((head, ours[start : start + MOST_BYTES], work))
                        work.missing += 1
                    if not peer.full:
                        self._send(peer)
                if peer.lost is None and key in peer.early:
                    self._take_early(peer, key, theirs, mark, work)
                elif peer.lost is None and theirs:
                    peer.posted[key] = theirs, mark, work
                    work.missing += 1
                if peer.lost is not None and (ours or theirs):
                    work.error = peer.lost
        return work

    def read(self, limit_s: float) -> bool:
        """Wait for packets, or for room to send, and handle them; returns whether there was anything."""
        ready = self._epoll.poll(limit_s)
        with self._state:
            for fd, event in ready:
                peer = self._by_fd[fd]
                if event & select.EPOLLOUT and peer.lost is None:
                    self._send(peer)
                if peer.lost is not None:
                    continue
                try:
                    self._receive(peer, peer.socket.recv_into(self._packet))
                except (BlockingIOError, ConnectionResetError):
                    pass  # a reset is told before what was sent until then
                except OSError as error:
                    self._lose(peer, RuntimeError(f"{peer.name}: {error}"))
                except BaseException:  # Ctrl-C, perhaps with a packet in hand
                    self._lose(peer, RuntimeError(f"reading from {peer.name} was interrupted"))
                    raise
        return bool(ready)

    def stop(self) -> None:
        """End all exchanges with an error on this rank. The other ranks do not notice."""
        with self._state:
            for peer in filter(None, self._peers):
                self._lose(peer, RuntimeError("the connection was given up"))

    def close(self) -> None:
        """Close the sockets. The other ranks notice it when they wait for this one."""
        self.stop()
        self._close()

    def forget(self) -> None:
        """Close the sockets in a forked process: only its parent's count as this rank's. What the two share stays as it
        is, and locks may be held by threads that are not here."""
        self._state = threading.Lock()
        for peer in filter(None, self._peers):
            self._fail(peer, RuntimeError("this process was forked"))
        self._close()

    def _close(self) -> None:
        self._epoll.close()
        for peer in filter(None, self._peers):
            peer.socket.close()

    # -- with `_state` held ---------------------------------------------------------------------------------------

    def _send(self, peer: _Peer) -> None:
        """Send what the socket has room for."""
        while peer.unsent:
            head, rows, work = peer.unsent[0]
            try:
                peer.socket.sendmsg((head, rows))
            except BlockingIOError:
                break
            except OSError as error:
                self._lose(peer, RuntimeError(f"{peer.name}: {error}"))
                return
            peer.unsent.popleft()
            work.missing -= 1
        if peer.full is not bool(peer.unsent):
            peer.full = not peer.full
            self._epoll.modify(peer.socket, select.EPOLLIN | (select.EPOLLOUT if peer.full else 0))

    def _receive(self, peer: _Peer, size: int) -> None:
        """Handle the packet of `size` bytes that was read."""
        if size == 0:
            raise ConnectionError("it closed its connection")
        channel, number, mark, rest = _HEAD.unpack_from(self._packet)
        key, rows = (channel, number), self._packet[_HEAD.size : size]
        if key not in peer.posted:
            self._keep_early(peer, key, mark, rest, rows)
            return
        into, expected, work = peer.posted[key]
        if (mark, rest) != (expected, len(into)):
            self._lose(peer, _unlike(peer))
            return
        into[: len(rows)] = rows
        if len(rows) < rest:
            peer.posted[key] = into[len(rows) :], mark, work
        else:
            del peer.posted[key]
            work.missing -= 1

    def _keep_early(self, peer: _Peer, key: _Key, mark: int, rest: int, rows: memoryview) -> None:
        """Keep a packet of a message whose exchange was not launched here yet."""
        arrived, expected, total = peer.early.setdefault(key, (bytearray(), mark, rest))
        if key[1] < self._launched[Channel(key[0])] or (mark, len(arrived) + rest) != (expected, total):
            self._lose(peer, _unlike(peer))
        arrived += rows

    def _take_early(self, peer: _Peer, key: _Key, into: memoryview, mark: int, work: NearWork) -> None:
        """Deliver what has arrived of a message whose exchange is launched now."""
        arrived, sent_mark, total = peer.early.pop(key)
        if (sent_mark, total) != (mark, len(into)):
            self._lose(peer, _unlike(peer))
            return
        into[: len(arrived)] = arrived
        if len(arrived) < total:
            peer.posted[key] = into[len(arrived) :], mark, work
            work.missing += 1

    def _lose(self, peer: _Peer, why: RuntimeError) -> None:
        if peer.lost is None:
            self._epoll.unregister(peer.socket)
            self._fail(peer, why)

    @staticmethod
    def _fail(peer: _Peer, why: RuntimeError) -> None:
        peer.lost = peer.lost or why
        for *_, work in [*peer.posted.values(), *peer.unsent]:
            work.error = work.error or why
        peer.posted.clear()
        peer.early.clear()
        peer.unsent.clear()


def _unlike(peer: _Peer) -> OtherLaunch:
    return OtherLaunch(f"{peer.name} sent something else than this rank expects: the ranks launch in different orders")


# -- connecting ----------------------------------------------------------------------------------------------------


_sockets_folder: Path | None = None


def put_sockets_in(folder: Path) -> None:
    """Put the sockets of later connections of this process there, in place of the system's temporary folder.

    They are there only while ranks connect; but a process that is killed meanwhile cannot remove its own.

    Args:
        folder: private to this user; whoever made it removes it with what was left in it.
    """
    global _sockets_folder
    _sockets_folder = folder


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
        folder, name = _sockets_folder, f"n{secrets.token_hex(4)}"  # short: a socket's path has 107 bytes at most
        if folder is None:
            made = tempfile.TemporaryDirectory(prefix="ubatch-", ignore_cleanup_errors=True)
            folder, name = Path(stack.enter_context(made)), "rank"
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        path = str(folder / name)
        listener.bind(path)
        stack.callback(Path(path).unlink, missing_ok=True)
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
    with ExitStack() as made:
        for rank in range(own):
            sockets[rank] = each = made.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            each.settimeout(timeout_s)
            each.connect(paths[rank])
            each.send(str(own).encode())
        listener.settimeout(timeout_s)
        while None in sockets[own + 1 :]:
            each, _ = listener.accept()
            made.enter_context(each).settimeout(timeout_s)
            if said := each.recv(16):  # else it has ended
                sockets[int(said)] = each
        for ready in filter(None, sockets):
            ready.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        made.pop_all()
    return sockets
