"""Tensor-parallel ranks in lock-step: what their leader takes in, and when, its followers take in too.

    leader      what came from the client | draw seeds | Turn to every follower | handle it, step, send what came out
    follower    wait for the Turn                                               | handle it, step, send nothing

Every process of a tensor-parallel group runs a scheduler of its own over a KV cache for its share of the heads, and all
must plan the same steps. A scheduler depends on the order of its calls only, and on the tokens of its steps, which are
the same on all of them. So it is enough that all get the same calls in the same order: before every step the leader
sends a turn, an empty one too, and while it pauses one for whatever reaches it. Nothing that a follower does depends on
a clock or on when a message arrives. A request without a seed gets one here: drawn twice, it would be two.

Each turn carries a checksum of what the leader's steps have given so far. A follower whose own is another one stops the
engine: ranks that disagree on the tokens would go on computing nonsense together. (The runner compares what is
scheduled at every step; but in the overlapped loop that is before the host knows the last tokens.)

A follower tells the client that it is ready, lives, has failed, or has written a profile; of requests it says nothing.
From the client it hears only `Shutdown`, which matters where its leader is gone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec
import zmq

from model_runner import fresh_seed
from serving.engine.options import EngineOptions
from serving.engine.wire.messages import (
    Add,
    Alive,
    Failed,
    FromEngine,
    Outputs,
    ProfileWritten,
    Ready,
    Refused,
    Shutdown,
    ToEngine,
    Turn,
    decode_turn,
    encode,
)
from serving.engine.wire.rendezvous import post_turns_address, turns_address
from serving.requests import RequestInput
from ubatch import TransferTimeout, UBatchError
from ubatch.process.heartbeat import beat
from ubatch.process.job_store import JobStore
from ubatch.process.lateness import Patience

__all__ = ["FollowerLink", "LeaderLink", "Link", "OutOfStep", "join_turns"]

_LINGER_MS = 2000
_LOOK_OUT_S = 1.0
"""How often a follower that waits for its leader's turn looks for a `Shutdown`, and whether its parent lives."""


class OutOfStep(UBatchError):
    """A tensor-parallel rank generated other tokens than its leader, or missed a turn."""


class Link(Protocol):
    """What carries messages (`EngineLink` is one)."""

    def send(self, message: FromEngine) -> None:
        """Send a message; does not wait."""

    def receive(self, wait_s: float = 0.0) -> Iterator[ToEngine]:
        """The messages that have come; waits up to `wait_s` for the first. 0 is before a step, more is a pause."""

    def close(self) -> None:
        """Send what is queued, and disconnect."""


def join_turns(
    link: Link, address: str, options: EngineOptions, rank: int, said: JobStore, look_out: Callable[[], None]
) -> Link:
    """What a rank takes its messages from: its own link if it is alone, else the leader's or a follower's end.

    Args:
        link: to the client.
        address: of the client.
        options: of all engines.
        rank: this process's.
        said: where followers say where they listen.
        look_out: raises if nobody needs this rank any more; called now and then while it waits for its leader.
    """
    if options.tensor_parallel_size == 1:
        return link
    leader = options.leader(options.dp_rank(rank))
    if rank == leader:
        followers = range(leader + 1, leader + options.tensor_parallel_size)
        return LeaderLink(link, [turns_address(said, follower) for follower in followers])
    names = options.describe_rank(rank), options.describe_rank(leader)
    follower = FollowerLink(link, _listen_on(address, rank), names, options.dbo.timeout_s, look_out)
    post_turns_address(said, rank, follower.address)
    return follower


def _listen_on(client_address: str, rank: int) -> str:
    """Beside the client's socket if that is a file, which ends with the client's folder; else a port of this host."""
    if client_address.startswith("ipc://"):
        return f"{client_address.rpartition('/')[0]}/turns-{rank}"
    return "tcp://127.0.0.1:*"


class LeaderLink:
    """The client's messages, handed on to the followers before they are handled here.

    Args:
        link: to the client.
        addresses: where the followers listen.
    """

    def __init__(self, link: Link, addresses: Sequence[str]) -> None:
        self._link = link
        self._context = zmq.Context()
        self._sockets = [_socket(self._context, zmq.PUSH) for _ in addresses]
        for socket, address in zip(self._sockets, addresses, strict=True):
            socket.connect(address)
        self._told = _Told()
        self._number = 0

    def send(self, message: FromEngine) -> None:
        """See `Link`."""
        self._told.note(message)
        self._link.send(message)

    def receive(self, wait_s: float = 0.0) -> Iterator[ToEngine]:
        """See `Link`. The followers get the same; a pause in which nothing comes is nothing to tell."""
        messages = [_with_seed(message) for message in self._link.receive(wait_s)]
        if messages or not wait_s:
            turn = encode(Turn(self._number, self._told.checksum, messages))
            self._number += 1
            for socket in self._sockets:
                socket.send(turn)
        yield from messages

    def close(self) -> None:
        """See `Link`."""
        _close(self._context, self._sockets)
        self._link.close()


class FollowerLink:
    """The leader's turns.

    Args:
        link: to the client.
        listen_on: a zmq address; a port may be `*`.
        names: what errors call this rank, and its leader.
        timeout_s: most seconds between two turns while steps run.
        look_out: see `join_turns`.

    Attributes:
        address: where the leader reaches it.
    """

    def __init__(
        self,
        link: Link,
        listen_on: str,
        names: tuple[str, str],
        timeout_s: float,
        look_out: Callable[[], None],
    ) -> None:
        self._link = link
        self._name, self._leader = names
        self._timeout_s = timeout_s
        self._look_out = look_out
        self._context = zmq.Context()
        self._socket = _socket(self._context, zmq.PULL)
        self._socket.bind(listen_on)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._told = _Told()
        self._number = 0

    def send(self, message: FromEngine) -> None:
        """See `Link`. What is about requests is the leader's to say."""
        self._told.note(message)
        if isinstance(message, Ready | Alive | Failed | ProfileWritten):
            self._link.send(message)

    def receive(self, wait_s: float = 0.0) -> Iterator[ToEngine]:
        """The next turn; before a step it is waited for, and in a pause up to `wait_s`.

        Raises:
            OutOfStep: this rank's steps gave something else than the leader's.
            TransferTimeout: the leader hands on nothing any more.
            Others: see `join_turns`, `look_out`.
        """
        patience = Patience(self._timeout_s)
        while not self._socket.poll(int((wait_s or _LOOK_OUT_S) * 1000)):
            if any(isinstance(message, Shutdown) for message in self._link.receive()):
                yield Shutdown()
                return
            if wait_s:
                return
            beat()
            self._look_out()
            if patience.over():
                raise TransferTimeout(
                    f"{self._leader} has begun no step for {self._timeout_s} s, and {self._name} waits for it. If its "
                    f"host really is that slow, raise timeout_s."
                )
        yield from self._next()

    def close(self) -> None:
        """See `Link`."""
        _close(self._context, [self._socket])
        self._link.close()

    def _next(self) -> Sequence[ToEngine]:
        turn = decode_turn(self._socket.recv())
        if turn.number != self._number:
            raise OutOfStep(f"{self._name} missed a turn of {self._leader}: {turn.number} came, not {self._number}.")
        if turn.told != self._told.checksum:
            raise OutOfStep(
                f"{self._name} generated other tokens than {self._leader} before turn {turn.number}. They must have "
                f"the same checkpoint, settings, kind of device and libraries."
            )
        self._number += 1
        return turn.messages


class _Told:
    """A checksum of what steps gave: the same on ranks that gave the same, in the same order."""

    def __init__(self) -> None:
        self.checksum = 0

    def note(self, message: FromEngine) -> None:
        """Count a message in, if it is about requests."""
        if isinstance(message, Outputs):
            for each in message.outputs:
                self._add(f"{each.request_id} {list(each.token_ids)} {each.finish_reason}")
        elif isinstance(message, Refused):
            self._add(f"{message.request_id} {message.kind}")

    def _add(self, text: str) -> None:
        self.checksum = zlib.crc32(text.encode(), self.checksum)


def _with_seed(message: ToEngine) -> ToEngine:
    """The message; a request that is sampled and brings no seed gets one."""
    if not isinstance(message, Add) or message.request.params.greedy or message.request.params.seed is not None:
        return message
    request: RequestInput = message.request
    seeded = replace(request, params=replace(request.params, seed=fresh_seed()))
    return msgspec.structs.replace(message, request=seeded)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)  # a follower is a step behind at most
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    return socket


def _close(context: zmq.Context[zmq.Socket[bytes]], sockets: Sequence[zmq.Socket[bytes]]) -> None:
    for socket in sockets:
        socket.close()
    context.term()
