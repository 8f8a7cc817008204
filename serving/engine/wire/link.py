"""The connection of an engine or a node to the client: one DEALER socket, connected to the client's ROUTER; and what
protects that one on the network: CURVE accepts clients with the cluster's secret, and refused ones are counted.

Before the handshake a stranger can make zmq hold one message of `MOST_BYTES` per connection, for `_HANDSHAKE_MS`.
"""

import asyncio
import hmac
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from model_runner import RequestError
from serving.engine.wire.messages import FromEngine, Outputs, Refused, Shutdown, ToEngine, decode_to_engine, encode
from serving.engine.wire.secret import CurveKeys
from serving.logs import log_event
from ubatch import UBatchError

_logger = logging.getLogger(__name__)

MOST_BYTES = 256 << 20
"""Most bytes of a message to node 0; a longer one ends its connection. Log-probabilities of a long prompt are 10 MB."""
_CURVE_BYTES = 256
"""Most bytes that encryption adds to a message."""
_HANDSHAKE_MS = 5000
_DOMAIN = "ubatch"
_REFUSED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
_SAY_EVERY_S = 60.0
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


class Seldom:
    """Logs an event that strangers can cause once a minute at most, with the number of times it happened."""

    def __init__(self, logger: logging.Logger, event: str) -> None:
        self._logger, self._event = logger, event
        self._times = 0
        self._said = -float("inf")

    def happened(self, **fields: object) -> None:
        """Count the event, and log it if the last line is old enough, with the `fields` of this event (`log_event`)."""
        self._times += 1
        now = time.monotonic()
        if now - self._said >= _SAY_EVERY_S:
            log_event(self._logger, self._event, level=logging.WARNING, times=self._times, **fields)
            self._times, self._said = 0, now


class CurveGate:
    """Requires CURVE authentication on a socket that is not bound yet."""

    def __init__(self, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, keys: CurveKeys) -> None:
        self._socket = socket
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.start()
        self._admitted = keys.client_public
        self._authenticator.configure_curve_callback(_DOMAIN, SimpleNamespace(callback=self._admits))
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.server_public, keys.server_secret
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # refuse all connections if the authenticator is gone
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES + _CURVE_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._monitor = socket.get_monitor_socket(_REFUSED)
        self._refused = Seldom(_logger, "connections refused: they do not have the cluster's secret")
        self._watch = asyncio.ensure_future(self._count_refused())

    def close(self) -> None:
        """Stop the authenticator; call it before the socket is closed."""
        self._watch.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._authenticator.stop()

    def _admits(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._admitted)

    async def _count_refused(self) -> None:
        while True:
            await recv_monitor_message(self._monitor)
            self._refused.happened()
