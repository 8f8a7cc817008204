"""An engine's, or a node's, end of the wire: one DEALER socket, connected to the client's ROUTER."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
import zmq

from model_runner import RequestError
from serving.engine.wire.gate import MOST_BYTES
from serving.engine.wire.messages import FromEngine, Outputs, Refused, Shutdown, ToEngine, decode_to_engine, encode
from serving.engine.wire.secret import CurveKeys
from ubatch import UBatchError

__all__ = ["EngineLink"]

_LINGER_MS = 2000
_TAKE_IN_S = 0.01
"""Least time in which messages are taken in before a step: some 70 us each, where requests come with them."""
_PATIENCE_S = 0.3
"""How long an engine whose step failed looks for the `Shutdown` that would explain it."""


class EngineLink:
    """A connection to the client.

    Args:
        address: where the client listens (`ipc://` or `tcp://`).
        identity: what the client sends to.
        curve: of the run, where the client is beyond this machine and the cluster has a secret.
    """

    def __init__(self, address: str, identity: str, curve: CurveKeys | None = None) -> None:
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._received_at = time.monotonic()
        self._taken: deque[bytes] = deque()  # messages that have come, and are still to be handled
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)  # what is queued is bounded by the requests that the client sent
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._most_bytes = None if curve is None else MOST_BYTES
        if curve is not None:
            self._socket.curve_serverkey = curve.server_public
            self._socket.curve_publickey, self._socket.curve_secretkey = curve.client_public, curve.client_secret
        self._socket.connect(address)

    def send(self, message: FromEngine) -> None:
        """Send a message; does not wait. Any thread may: lanes that wait for peers beat, too.

        Of outputs that are longer together than node 0 takes from another machine, each goes by itself; a request whose
        output alone is longer is refused, and the others go on.

        Raises:
            UBatchError: another message is longer than that.
        """
        data = encode(message)
        if self._most_bytes is not None and len(data) > self._most_bytes:
            for part in _smaller(message, len(data), self._most_bytes):
                self.send(part)
            return
        with self._lock:
            self._socket.send(data)

    def receive(self, wait_s: float = 0.0) -> Iterator[ToEngine]:
        """Messages that have come; waits up to `wait_s` for the first.

        A large body's requests do not hold up a step for longer than the step before took: the rest comes next time.
        Where no step waits, what was sent together is taken together.
        """
        took = time.monotonic() - self._received_at
        if wait_s and not self._taken and not self._socket.poll(int(wait_s * 1000)):
            self._received_at = time.monotonic()
            return
        until = time.monotonic() + max(took, _TAKE_IN_S)
        while (now := time.monotonic()) < until or (wait_s and self._taken):
            self._received_at = now
            if not self._taken:
                try:
                    self._taken.extend(self._socket.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    return
            yield decode_to_engine(self._taken.popleft())

    def shutdown_comes(self) -> bool:
        """Whether `Shutdown` is among what has come, or comes in a moment. Everything else is dropped."""
        deadline = time.monotonic() + _PATIENCE_S
        while (left := deadline - time.monotonic()) > 0:
            if any(isinstance(message, Shutdown) for message in self.receive(left)):
                return True
        return False

    def close(self) -> None:
        """Send what is queued, and disconnect."""
        self._socket.close()
        self._context.term()


def _smaller(message: FromEngine, num_bytes: int, most_bytes: int) -> Sequence[FromEngine]:
    """What says as much in messages that are not as long; the client aborts a request that is refused."""
    takes = f"{num_bytes} bytes for node 0, which takes {most_bytes} from another machine"
    if not isinstance(message, Outputs) or not message.outputs:
        raise UBatchError(f"a message, {type(message).__name__}, has {takes}.")
    middle = len(message.outputs) // 2
    if middle:
        halves = message.outputs[:middle], message.outputs[middle:]
        return [msgspec.structs.replace(message, outputs=half) for half in halves]
    request_id = message.outputs[0].request_id
    text = (
        f"an output of request {request_id!r} has {takes}: ask for fewer log-probabilities, or for a shorter prompt's."
    )
    refused = Refused(message.rank, request_id, RequestError.__name__, text)
    return [refused, msgspec.structs.replace(message, outputs=())]
