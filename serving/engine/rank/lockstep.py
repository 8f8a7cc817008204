"""Tensor-parallel ranks in lock-step: followers handle the same messages as their leader, before the same step.

    leader      receive from the client | send a Turn to every follower | handle it, step, send outputs
    follower    wait for the Turn                                       | handle it, step, send nothing

Every process of a tensor-parallel group runs a scheduler of its own over a KV cache for its share of the heads, and all
must plan the same steps. A scheduler depends only on the order of its calls and on the tokens of its steps, which are
the same on all processes. So all must get the same calls in the same order: the leader sends a turn before every step,
even an empty one, and during a pause one for every batch of messages. Nothing that a follower does depends on a clock,
on when a message arrives, or on when a grammar is made: the leader says when a request with one is admitted (`Admit`).
Every request has a seed: the client draws one for those that have none.

Each turn carries a checksum of the outputs of the leader's steps so far. A follower with another checksum stops the
engine: ranks that disagree on the tokens would compute garbage. (The runner compares what is scheduled at every step;
but in the overlapped loop that is before the host knows the last tokens.)

A follower sends the client `Ready`, `Alive`, `Loads`, `Failed` and `ProfileWritten`, and nothing about requests. From
the client it receives only `Shutdown`, for the case that its leader is dead.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import zmq

from serving.engine.options import EngineOptions
from serving.engine.wire import messages as wire
from ubatch import TransferTimeout, UBatchError
from ubatch.process import beat
from ubatch.process.job_store import Patience

_LINGER_MS = 2000
_LOOK_OUT_S = 1.0
"""How often a follower that waits for a turn checks for `Shutdown`, and that its parent lives, in seconds."""


class OutOfStep(UBatchError):
    """A tensor-parallel rank generated other tokens than its leader, or missed a turn."""


class Link(Protocol):
    """A connection that carries messages (`EngineLink` is one)."""

    def send(self, message: wire.FromEngine) -> None:
        """Send a message without waiting."""

    def receive(self, wait_s: float = 0.0) -> Iterator[wire.ToEngine]:
        """The received messages; waits up to `wait_s` for the first. Callers give 0 before a step, more in a pause."""

    def decide(self, messages: Sequence[wire.ToEngine]) -> Sequence[wire.ToEngine]:
        """The messages that this rank handles now, of those that it has for itself. A leader passes them to all ranks
        with the next turn; a follower handles only what its leader has decided."""

    def close(self) -> None:
        """Send queued messages, and disconnect."""


def join_turns(link: Link, folder: Path, options: EngineOptions, rank: int, look_out: Callable[[], None]) -> Link:
    """The link from which a rank gets its messages: `link` without tensor parallelism, else a leader's or follower's.

    Args:
        folder: private to the run on this machine, which has all ranks of the group; followers' sockets lie there.
        look_out: called now and then while a follower waits for its leader; raises if the parent process is gone.
    """
    if options.tensor_parallel_size == 1:
        return link
    leader = options.leader(options.dp_rank(rank))
    if rank == leader:
        followers = range(leader + 1, leader + options.tensor_parallel_size)
        return LeaderLink(link, [_address(folder, follower) for follower in followers])
    names = options.describe_rank(rank), options.describe_rank(leader)
    return FollowerLink(link, _address(folder, rank), names, options.dbo.timeout_s, look_out)


def _address(folder: Path, follower: int) -> str:
    return f"ipc://{folder}/turns-{follower}"


class _TurnsLink:
    """A connection to the client, beside one to the ranks of the group."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._context = zmq.Context()
        self._told = 0
        self._number = 0

    def close(self) -> None:
        self._context.destroy()
        self._link.close()


class LeaderLink(_TurnsLink):
    """Receives the client's messages, and forwards them to the followers before this process handles them."""

    def __init__(self, link: Link, addresses: Sequence[str]) -> None:
        super().__init__(link)
        self._own: list[wire.ToEngine] = []
        self._sockets = [_socket(self._context, zmq.PUSH) for _ in addresses]
        for socket, address in zip(self._sockets, addresses, strict=True):
            socket.connect(address)

    def send(self, message: wire.FromEngine) -> None:
        self._told = _with_outputs(self._told, message)
        self._link.send(message)

    def receive(self, wait_s: float = 0.0) -> Iterator[wire.ToEngine]:
        """See `Link`. Followers get the same messages; during a pause an empty batch is not sent."""
        messages, self._own = [*self._own, *self._link.receive(wait_s)], []
        if messages or not wait_s:
            turn = wire.encode(wire.Turn(self._number, self._told, messages))
            self._number += 1
            for socket in self._sockets:
                socket.send(turn)
        yield from messages

    def decide(self, messages: Sequence[wire.ToEngine]) -> Sequence[wire.ToEngine]:
        self._own = list(messages)
        return ()


class FollowerLink(_TurnsLink):
    """Receives the leader's turns.

    Args:
        listen_on: a zmq address.
        names: names of this rank and of its leader in errors.
        timeout_s: most seconds between two turns while steps run.
    """

    def __init__(
        self, link: Link, listen_on: str, names: tuple[str, str], timeout_s: float, look_out: Callable[[], None]
    ) -> None:
        super().__init__(link)
        self._name, self._leader = names
        self._timeout_s = timeout_s
        self._look_out = look_out
        self._socket = _socket(self._context, zmq.PULL)
        self._socket.bind(listen_on)

    def send(self, message: wire.FromEngine) -> None:
        """See `Link`. Messages about requests are dropped: the leader sends them."""
        self._told = _with_outputs(self._told, message)
        if isinstance(message, wire.Ready | wire.Alive | wire.Failed | wire.Loads | wire.ProfileWritten):
            self._link.send(message)

    def receive(self, wait_s: float = 0.0) -> Iterator[wire.ToEngine]:
        """The messages of the next turn. With `wait_s` 0 (before a step) waits until it arrives, else up to `wait_s`.

        Raises:
            OutOfStep: this rank's steps gave other outputs than the leader's.
            TransferTimeout: the leader sent no turn for `timeout_s`.
            Others: raised by `look_out`, see `join_turns`.
        """
        patience = Patience(self._timeout_s)
        while not self._socket.poll(int((wait_s or _LOOK_OUT_S) * 1000)):
            if any(isinstance(message, wire.Shutdown) for message in self._link.receive()):
                yield wire.Shutdown()
                return
            if wait_s:
                return
            beat()
            self._look_out()
            if patience.over():
                raise TransferTimeout(
                    f"{self._leader} has begun no step for {self._timeout_s} s, and {self._name} waits for it. If its "
                    f"host is slow, raise timeout_s."
                )
        yield from self._next()

    def decide(self, messages: Sequence[wire.ToEngine]) -> Sequence[wire.ToEngine]:
        return ()

    def _next(self) -> Sequence[wire.ToEngine]:
        turn = wire.decode_turn(self._socket.recv())
        if turn.number != self._number:
            raise OutOfStep(f"{self._name} missed a turn of {self._leader}: {turn.number} arrived, not {self._number}.")
        if turn.told != self._told:
            raise OutOfStep(
                f"{self._name} generated other tokens than {self._leader} before turn {turn.number}. They must have "
                f"the same checkpoint, settings, kind of device and libraries."
            )
        self._number += 1
        return turn.messages


def _with_outputs(checksum: int, message: wire.FromEngine) -> int:
    """A rank's checksum after a message: the same on ranks with the same outputs in the same order."""
    match message:
        case wire.Outputs():
            parts = [f"{each.request_id} {list(each.token_ids)} {each.finish_reason}" for each in message.outputs]
            return zlib.crc32("".join(parts).encode(), checksum)
        case wire.Refused():
            return zlib.crc32(f"{message.request_id} {message.kind}".encode(), checksum)
        case _:
            return checksum


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)  # a follower is a step behind at most
    socket.linger = _LINGER_MS
    return socket
