"""The server's socket and its connections: their limit, and time-outs for slow clients.

file descriptors    the soft limit is raised; if they run out all the same, accepting pauses for a second at a time
too many            a request on a connection beyond the limit gets 503 and `Retry-After`
slow client         408 if the headers are not complete within `HEADERS_S`, no part of the body arrives for `BODY_S`, or
                    the body is not complete within `WHOLE_BODY_S`; a connection that has sent nothing is closed without
                    an answer
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from serving.api.schema.errors import ApiError, error_response
from serving.logs import log_event
from ubatch import UBatchError

_logger = logging.getLogger(__name__)

HEADERS_S = 10.0
BODY_S = 20.0
WHOLE_BODY_S = 120.0
_WANTED_FILES = 65535
_OTHER_FILES = 128
"""File descriptors for everything but connections: engines, sockets between processes, files."""
_RETRY_S = 1.0
"""asyncio's pause after it was out of file descriptors."""
_SAY_EVERY_S = 60.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class CannotListen(UBatchError):
    """The server cannot listen on its address or port."""


def raise_file_limit() -> int:
    """Raise the soft limit of open files for this process and its children, to 65535 at most; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _WANTED_FILES if soft == resource.RLIM_INFINITY else soft


def most_connections(files: int) -> int:
    """How many connections to allow with a limit of `files` file descriptors."""
    return max(files - _OTHER_FILES, files // 2, 1)


class Listener(socket.socket):
    """A listening socket that logs at most once a minute that file descriptors have run out.

    asyncio then pauses accepting, but it first tries again several times and logs each failure with a traceback.
    """

    _paused_until = -float("inf")
    _said = -float("inf")

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection."""
        now = time.monotonic()
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            if now < self._paused_until:
                raise BlockingIOError from error  # asyncio got the error already, and pauses
            self._paused_until = now + _RETRY_S / 2
            if now - self._said > _SAY_EVERY_S:
                self._said = now
                log_event(_logger, "no connection can be accepted", level=logging.WARNING, error=error.strerror)
            raise

    @staticmethod
    def spare_traceback(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception handler of the event loop that ignores the errors that `accept` has logged."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _EXHAUSTED and "accept" in context.get("message", "")):
            loop.default_exception_handler(context)


@contextmanager
def listening(host: str, port: int) -> Iterator[Listener]:
    """The server's socket, bound before the engines start. The server calls `listen` once the engines are ready."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = Listener(family, kind, protocol)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}: {error.strerror}. Choose another --host.") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise CannotListen(
                f"cannot listen on {host}:{port}: {error.strerror}. Choose another --port, or --port 0 for a free one."
            ) from error
        yield listener


def connection_protocol(most: int, around: Callable[[ASGIApp], ASGIApp]) -> type[H11Protocol]:
    """The protocol class of a connection, for uvicorn.

    Args:
        most: most open connections; requests on further ones get 503.
        around: middleware that logs requests, for those refused here, which the application does not see.
    """

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(503, f"{most} connections are open, which is the limit.", code="too_many_connections")
        response = error_response(error)
        response.headers["Connection"] = "close"
        await response(scope, receive, send)

    refusing: Any = around(refuse)

    class Connection(H11Protocol):
        """A connection that is closed if a request does not arrive in time."""

        _too_late: asyncio.TimerHandle | None = None
        _body_ends: float | None = None  # the loop's time at which the body has to be complete

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                self.app = refusing
            self._look_at_the_clock()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look_at_the_clock()

        def on_response_complete(self) -> None:
            self._body_ends = None
            super().on_response_complete()
            self._look_at_the_clock()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_the_clock()
            super().connection_lost(exc)

        def _look_at_the_clock(self) -> None:
            """Start or stop the timer: `HEADERS_S` from a request's first byte (or the connection's start, before any
            request), `BODY_S` from the body's last bytes, `WHOLE_BODY_S` from its first. Between requests uvicorn's
            keep-alive timer runs."""
            if self.conn.their_state is h11.SEND_BODY:
                self._stop_the_clock()
                now = self.loop.time()
                self._body_ends = self._body_ends or now + WHOLE_BODY_S
                self._too_late = self.loop.call_at(min(now + BODY_S, self._body_ends), self._give_up)
            elif self.conn.their_state is not h11.IDLE or self.timeout_keep_alive_task is not None:
                self._stop_the_clock()
            elif self._too_late is None:
                self._too_late = self.loop.call_later(HEADERS_S, self._give_up)

        def _stop_the_clock(self) -> None:
            if self._too_late is not None:
                self._too_late.cancel()
                self._too_late = None

        def _give_up(self) -> None:
            amid_body = self.conn.their_state is h11.SEND_BODY
            if amid_body and self.flow.read_paused:  # the application is slow to read, not the client to send
                self._too_late = self.loop.call_later(BODY_S, self._give_up)
                return
            answered = self.cycle.response_started if amid_body else self.conn.our_state is not h11.IDLE
            if not answered and (amid_body or self.conn.trailing_data[0]):
                self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            self.transport.close()

    return Connection
