"""Every HTTP request gets an id, for the log, the answer and errors (the client's `X-Request-Id`, or a new one), and is
counted by what came of it.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.logs import log_event, request_id
from serving.metrics import in_memory

if TYPE_CHECKING:
    from serving.api.generation import Output

_logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
_PLAIN = re.compile(r"[!-~]{1,128}")
"""A valid client's id: 1 to 128 printable ASCII characters without spaces, since it is written into logs."""


class RequestLog:
    """Middleware around the whole application: gives every request its id, and logs and counts its status and duration.

    Args:
        access_log: log every request. The query string is left out, as it may hold secrets.
        headers: return the id to the client.
        count: called with every request's scope, status and seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access_log: bool = False,
        headers: bool = True,
        count: Callable[[Scope, int | None, float], None] = lambda scope, status, seconds: None,
    ) -> None:
        self._app, self._access_log, self._headers, self._count = app, access_log, headers, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        own = given if _PLAIN.fullmatch(given) else uuid.uuid4().hex
        status: int | None = None
        begun = time.monotonic()

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._headers:
                    MutableHeaders(scope=message)[HEADER] = own
            await send(message)

        token = request_id.set(own)
        try:
            await self._app(scope, receive, send_on)
        finally:
            seconds = time.monotonic() - begun
            self._count(scope, status, seconds)
            if self._access_log:
                client = scope["client"][0] if scope.get("client") else None
                what = {"client": client, "method": scope["method"], "path": scope["path"], "status": status}
                log_event(_logger, "answered", **what, seconds=seconds)
            request_id.reset(token)


def log_outputs(answer_id: str, outputs: Sequence[Output], most: int | None) -> None:
    """Log a request's outputs: ids and parameters at level info, prompts at level debug.

    Args:
        most: most token ids logged of each prompt; None for all.
    """
    for output in outputs:
        token_ids, params = output.request.token_ids, output.request.params
        own = f"{answer_id}-{output.index}"
        log_event(_logger, "request received", output=own, prompt_tokens=len(token_ids), params=params)
        if _logger.isEnabledFor(logging.DEBUG):
            log_event(_logger, "prompt", level=logging.DEBUG, output=own, token_ids=list(token_ids[:most]))


_NOT_COUNTED = frozenset({"/metrics", "/health", "/live", "/load", "/ping", "/version", "/server_info"})
"""Paths that are asked for all the time, by what watches the server; vLLM's, and `/live`."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_OTHER = "none"
"""The label of what has no route, or no known method: a client could send any number of names."""
_SECONDS = (0.1, 0.5, 1)
_FINER_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60),
)


class HttpMetrics:
    """Counts HTTP requests by what came of them, with the names of prometheus-fastapi-instrumentator, as vLLM has them.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        with in_memory():
            self._requests = Counter(
                "http_requests",
                "HTTP requests by method, status (2xx, 4xx, ...) and route.",
                ["handler", "method", "status"],
                registry=registry,
            )
            self._seconds = Histogram(
                "http_request_duration_seconds",
                "From an HTTP request's arrival to the end of its answer, by route.",
                ["handler", "method"],
                registry=registry,
                buckets=_SECONDS,
            )
            self._finer = Histogram(
                "http_request_duration_highr_seconds",
                "The same, of all routes together, in finer buckets.",
                registry=registry,
                buckets=_FINER_SECONDS,
            )

    def count(self, scope: Scope, status: int | None, seconds: float) -> None:
        """Count a request that has been answered.

        Args:
            scope: the request's, after the application has looked for its route.
            status: the answer's; None if the client left before there was one.
        """
        handler = getattr(scope.get("route"), "path", _OTHER)
        if scope["path"].removeprefix(scope.get("root_path", "")) in _NOT_COUNTED:
            return
        method = scope["method"] if scope["method"] in _METHODS else _OTHER
        self._requests.labels(handler, method, f"{(status or 499) // 100}xx").inc()
        self._seconds.labels(handler, method).observe(seconds)
        self._finer.observe(seconds)
