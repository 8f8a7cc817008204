"""The connection of an engine or a node to the client: one DEALER socket, connected to the client's ROUTER."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from model_runner import RequestError
from serving.engine.wire.gate import MOST_BYTES
from serving.engine.wire.messages import FromEngine, Outputs, Refused, Shutdown, ToEngine, decode_to_engine, encode
from serving.engine.wire.secret import CurveKeys
from ubatch import UBatchError

_LINGER_MS = 2000
_TAKE_IN_S = 0.01
"""Least time budget for handling messages before a step, in seconds; a message with a request takes some 70 us."""
_PATIENCE_S = 0.3
"""How long an engine whose step failed waits for a `Shutdown` that would explain the failure, in seconds."""


class EngineLink:
    """A connection to the client.

    Args:
        identity: zmq identity of this end, to which the client sends.
        curve: keys of the run, if the client is on another machine and the cluster has a secret.
    """

    def __init__(self, address: str, identity: str, curve: CurveKeys | None = None) -> None:
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._received_at = time.monotonic()
        self._taken: deque[bytes] = deque()  # received messages that are not handled yet
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.set_hwm(0)  # no limit needed: the client's requests bound the queue
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._most_bytes = None if curve is None else MOST_BYTES
        self._monitor = self._socket.get_monitor_socket(zmq.Event.CONNECTED | zmq.Event.DISCONNECTED)
        self._disconnected_at: float | None = None
        if curve is not None:
            self._socket.curve_serverkey = curve.server_public
            self._socket.curve_publickey, self._socket.curve_secretkey = curve.client_public, curve.client_secret
        self._socket.connect(address)

    def send(self, message: FromEngine) -> None:
        """Send a message without waiting. Thread-safe: lanes that wait for peers send heartbeats, too.

        Outputs that together exceed node 0's limit for messages from another machine are split; a request whose single
        output exceeds it is refused, and the others continue.

        Raises:
            UBatchError: a message other than `Outputs` exceeds the limit.
        """
        data = encode(message)
        if self._most_bytes is not None and len(data) > self._most_bytes:
            for part in _smaller(message, len(data), self._most_bytes):
                self.send(part)
            return
        with self._lock:
            self._socket.send(data)

    def receive(self, wait_s: float = 0.0) -> Iterator[ToEngine]:
        """Received messages; waits up to `wait_s` for the first.

        Handling messages delays a step by no more than the last step's time: the rest is returned by the next call.
        With `wait_s` above 0 no step waits, and messages that were sent together are returned together.
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

    def decide(self, messages: Sequence[ToEngine]) -> Sequence[ToEngine]:
        """All of them: this rank decides for itself; see `serving.engine.rank.lockstep.Link`."""
        return messages

    def shutdown_comes(self) -> bool:
        """Whether a `Shutdown` was received or arrives within 0.3 s. All other messages are dropped."""
        deadline = time.monotonic() + _PATIENCE_S
        while (left := deadline - time.monotonic()) > 0:
            if any(isinstance(message, Shutdown) for message in self.receive(left)):
                return True
        return False

    def disconnected_s(self) -> float:
        """How long the client's process has not been connected after it was, in seconds; 0 if it is, or never was."""
        while self._monitor.poll(0):
            lost = recv_monitor_message(self._monitor)["event"] == zmq.Event.DISCONNECTED
            self._disconnected_at = time.monotonic() if lost else None
        return 0.0 if self._disconnected_at is None else time.monotonic() - self._disconnected_at

    def close(self) -> None:
        """Send queued messages, and disconnect."""
        self._socket.disable_monitor()
        self._context.destroy()


def _smaller(message: FromEngine, num_bytes: int, most_bytes: int) -> Sequence[FromEngine]:
    """Split a message that is too long into shorter ones. The client aborts a refused request."""
    takes = f"{num_bytes} bytes for node 0, which takes {most_bytes} from another machine"
    if not isinstance(message, Outputs) or not message.outputs:
        raise UBatchError(f"a message, {type(message).__name__}, has {takes}.")
    middle = len(message.outputs) // 2
    if middle:
        halves = message.outputs[:middle], message.outputs[middle:]
        return [msgspec.structs.replace(message, outputs=half) for half in halves]
    request_id = message.outputs[0].request_id
    text = f"an output of request {request_id!r} has {takes}: ask for fewer log-probabilities, or shorten the prompt."
    refused = Refused(message.rank, request_id, RequestError.__name__, text)
    return [refused, msgspec.structs.replace(message, outputs=())]
