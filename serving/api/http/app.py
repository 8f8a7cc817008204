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

# Seen without the key: what watches a server, and what describes it.
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
    """The API over an engine. Set `app.state.draining` to take no new requests.

    Args:
        engine: what generates.
        tokenizer: of its model.
        served_model_name: what clients call the model; of several, the first stands in answers.
        api_key: what clients must send as `Authorization: Bearer`, except to paths that only watch or describe.
        max_waiting_requests: more are answered with 503 and `Retry-After`; None for no limit.
        max_request_bytes: a larger body is answered with 413; None for no limit.
        max_outputs_per_request: a body that asks for more is answered with 400; None for no limit.
        defaults: sampling parameters where a request gives none.
        observer: told about every output.
        metrics_app: answers `/metrics`.
        profiles: `/start_profile` may be called; 404 otherwise.
        around: what gives every request its id, and logs its answer.
        log_requests: log what is generated, with its parameters; at level debug also the prompt.
        max_log_len: token ids of a prompt that are shown then; None for all.
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
    # The middleware checks the key, before anything of a body is read; this one says so in the description.
    told = [] if api_key is None else [Security(HTTPBearer(auto_error=False))]
    app.include_router(router, dependencies=told)
    if metrics_app is not None:
        app.router.routes.append(Route("/metrics", _Forwarded(metrics_app), include_in_schema=False))
    complete_description(app, OPEN_PATHS)
    build = app.build_middleware_stack  # what is added as middleware does not see the answers to unexpected errors
    app.build_middleware_stack = lambda: around(build())  # type: ignore[method-assign]
    return app


class _Forwarded:
    """An ASGI application as a route's end point: an instance, for Starlette takes a function for something else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _ApiKey:
    """Answers 401 where the key is missing or wrong."""

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
