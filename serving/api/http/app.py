"""The FastAPI application."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from secrets import compare_digest
from typing import TYPE_CHECKING

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.api.http.bodies import BodyLimit
from serving.api.http.description import complete_description
from serving.api.http.routes import router
from serving.api.long_work import LongWork
from serving.api.observer import NoObserver, RequestObserver
from serving.api.request_log import RequestLog
from serving.api.sampling import SamplingDefaults
from serving.api.schema.errors import ApiError, add_error_handlers, error_response
from serving.api.service import Engine, Service

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["create_app"]

# Paths that need no API key: health, metrics and descriptions.
OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version", "/openapi.json", "/docs", "/redoc"})


def create_app(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    served_model_name: str | Sequence[str],
    api_key: str | None = None,
    max_waiting_requests: int | None = None,
    max_request_bytes: int | None = None,
    max_outputs_per_request: int | None = None,
    defaults: SamplingDefaults | None = None,
    observer: RequestObserver | None = None,
    metrics_app: ASGIApp | None = None,
    profiles: bool = False,
    around: Callable[[ASGIApp], ASGIApp] = RequestLog,
    log_requests: bool = False,
    max_log_len: int | None = None,
) -> FastAPI:
    """The HTTP API over an engine. Set `app.state.draining` to True to refuse new requests.

    Args:
        engine: generates the outputs.
        tokenizer: the model's.
        served_model_name: the model's name or names; answers to requests without a name have the first.
        api_key: clients must send it as `Authorization: Bearer`, except to `OPEN_PATHS`; None for no key.
        max_waiting_requests: further requests get 503 and `Retry-After`; None for no limit.
        max_request_bytes: a larger body gets 413; None for no limit.
        max_outputs_per_request: a body that asks for more gets 400; None for no limit.
        defaults: sampling parameters that a request leaves out.
        observer: receives the events of every output.
        metrics_app: answers `/metrics`.
        profiles: allow `/start_profile`; 404 otherwise.
        around: outermost middleware, which gives every request its id and logs its status.
        log_requests: log each output's id and parameters; at level debug also the prompt.
        max_log_len: most token ids logged of a prompt; None for all.
    """
    app = FastAPI(title="ubatch", description="An OpenAI-compatible server.")
    app.state.service = Service(
        engine=engine,
        tokenizer=tokenizer,
        names=(served_model_name,) if isinstance(served_model_name, str) else tuple(served_model_name),
        defaults=SamplingDefaults() if defaults is None else defaults,
        observer=NoObserver() if observer is None else observer,
        max_waiting_requests=max_waiting_requests,
        max_outputs_per_request=max_outputs_per_request,
        long_work=LongWork(lambda: app.state.draining),
        profiles=profiles,
        log_requests=log_requests,
        max_log_len=max_log_len,
    )
    app.state.draining = False
    add_error_handlers(app, router.routes)
    if max_request_bytes is not None:
        app.add_middleware(BodyLimit, max_bytes=max_request_bytes)
    if api_key is not None:
        app.add_middleware(_ApiKey, key=api_key)
    # `_ApiKey` checks the key before it reads a body; this dependency only puts it into /openapi.json.
    told = [] if api_key is None else [Security(HTTPBearer(auto_error=False))]
    app.include_router(router, dependencies=told)
    if metrics_app is not None:
        app.router.routes.append(Route("/metrics", _Forwarded(metrics_app), include_in_schema=False))
    complete_description(app, OPEN_PATHS)
    build = app.build_middleware_stack  # `add_middleware` would not see the answers to unexpected errors
    app.build_middleware_stack = lambda: around(build())  # type: ignore[method-assign]
    return app


class _Forwarded:
    """An ASGI application as a route's end point. An instance: Starlette calls functions with a request instead."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _ApiKey:
    """Middleware that answers 401 if the key is missing or wrong."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._opens(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        message = "The API key is missing or wrong; send it as `Authorization: Bearer KEY`."
        await error_response(ApiError(401, message, code="invalid_api_key"))(scope, receive, send)

    def _opens(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and compare_digest(key.strip().encode(), self._key)
