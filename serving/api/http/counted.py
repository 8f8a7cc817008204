"""Counts HTTP requests by what came of them, with the names of prometheus-fastapi-instrumentator, as vLLM has them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import Scope

from serving.metrics import in_memory

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
    """The metrics of HTTP requests.

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
