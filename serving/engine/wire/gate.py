"""Node 0's socket on the network: CURVE lets in who has the cluster's secret, and the rest is counted.

Before the handshake a stranger can make zmq hold one message of `MOST_BYTES` per connection, for `_HANDSHAKE_MS`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from serving.engine.wire.secret import CurveKeys
from serving.logs import log_event

__all__ = ["MOST_BYTES", "CurveGate", "Seldom"]

_logger = logging.getLogger(__name__)

MOST_BYTES = 256 << 20
"""Of a message to node 0; a longer one ends its connection. Log-probabilities of a long prompt are some 10 MB."""
_CURVE_BYTES = 256
"""What encryption adds to a message at most."""
_HANDSHAKE_MS = 5000
_DOMAIN = "ubatch"
_REFUSED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
_SAY_EVERY_S = 60.0


class Seldom:
    """Something that strangers can cause, in the log now and then, with how often it happened.

    Args:
        logger: of who says it.
        event: what is said.
        every_s: seconds between two lines, at least.
    """

    def __init__(self, logger: logging.Logger, event: str, every_s: float = _SAY_EVERY_S) -> None:
        self._logger, self._event, self._every_s = logger, event, every_s
        self._times = 0
        self._said = -float("inf")

    def happened(self, **fields: object) -> None:
        """It happened; `fields` as of `log_event`, of this time only."""
        self._times += 1
        now = time.monotonic()
        if now - self._said >= self._every_s:
            log_event(self._logger, self._event, level=logging.WARNING, times=self._times, **fields)
            self._times, self._said = 0, now


class CurveGate:
    """Guards a socket that is to be bound.

    Args:
        context: of the socket.
        socket: not bound yet.
        keys: of the run.
    """

    def __init__(self, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, keys: CurveKeys) -> None:
        self._socket = socket
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, _Only(keys.client_public))
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.server_public, keys.server_secret
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # refuse everybody, should the authenticator be gone
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES + _CURVE_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._monitor = socket.get_monitor_socket(_REFUSED)
        self._refused = Seldom(_logger, "connections refused: they do not have the cluster's secret")
        self._watch = asyncio.ensure_future(self._count_refused())

    def close(self) -> None:
        """Guard no more; before the socket is closed."""
        self._watch.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._authenticator.stop()

    async def _count_refused(self) -> None:
        while True:
            await recv_monitor_message(self._monitor)
            self._refused.happened()


class _Only:
    """Lets in one key."""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public_key)
