"""Protects node 0's socket on the network: CURVE accepts clients with the cluster's secret; refused ones are counted.

Before the handshake a stranger can make zmq hold one message of `MOST_BYTES` per connection, for `_HANDSHAKE_MS`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from types import SimpleNamespace

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from serving.engine.wire.secret import CurveKeys
from serving.logs import log_event

_logger = logging.getLogger(__name__)

MOST_BYTES = 256 << 20
"""Most bytes of a message to node 0; a longer one ends its connection. Log-probabilities of a long prompt are 10 MB."""
_CURVE_BYTES = 256
"""Most bytes that encryption adds to a message."""
_HANDSHAKE_MS = 5000
_DOMAIN = "ubatch"
_REFUSED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
_SAY_EVERY_S = 60.0


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
