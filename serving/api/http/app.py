"""The FastAPI application, and what FastAPI cannot derive for its `/openapi.json`: this server's names and limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from secrets import compare_digest
from typing import Any

from fastapi import FastAPI, Request, Response, Security
from fastapi.security import HTTPBearer
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.api.http.bodies import BodyLimit
from serving.api.http.routes import STREAMED, router
from serving.api.request_log import RequestLog
from serving.api.sampling import MAX_ALLOWED_OF_ALL
from serving.api.schema.errors import ApiError, add_error_handlers, error_response
from serving.api.service import Service
from serving.api.sse import ClientLeft

_BODIES = ("CompletionRequest", "ChatCompletionRequest", "ResponsesRequest", "TokenizeRequest", "DetokenizeRequest")
CLIENT_LEFT = 499  # nginx's status for a client that has left; it is only logged
# Paths that need no API key: health, metrics and descriptions.
OPEN_PATHS = frozenset({"/health", "/live", "/ping", "/metrics", "/version", "/openapi.json", "/docs", "/redoc"})


def create_app(
    service: Service,
    *,
    api_key: str | None = None,
    max_request_bytes: int | None = None,
    metrics_app: ASGIApp | None = None,
    around: Callable[[ASGIApp], ASGIApp] = RequestLog,
    root_path: str = "",
    describes: bool = True,
    cross_origin: Mapping[str, Any] | None = None,
) -> FastAPI:
    """The HTTP API of a service.

    Args:
        service: the engine, the tokenizer and the settings.
        api_key: clients must send it as `Authorization: Bearer`, in UTF-8, except to `OPEN_PATHS`; None for no key.
        max_request_bytes: a larger body gets 413; None for no limit.
        metrics_app: answers `/metrics`.
        around: outermost middleware, which gives every request its id and logs its status.
        root_path: path in front of all others, where a proxy puts the server.
        describes: serve `/openapi.json` and the pages that show it.
        cross_origin: which pages in browsers may call: arguments of Starlette's `CORSMiddleware`; None for none.
    """
    where = "/openapi.json" if describes else None
    app = FastAPI(title="ubatch", description="An OpenAI-compatible server.", openapi_url=where)
    app.state.service = service
    add_error_handlers(app, router.routes)
    app.add_exception_handler(ClientLeft, _nobody_reads)
    if max_request_bytes is not None:
        app.add_middleware(BodyLimit, max_bytes=max_request_bytes)
    if api_key is not None:
        app.add_middleware(_ApiKey, key=api_key)
    if cross_origin is not None:  # around the check of the key: a browser asks first, without one
        app.add_middleware(CORSMiddleware, **cross_origin)
    # `_ApiKey` checks the key before it reads a body; this dependency only puts it into /openapi.json.
    told = [] if api_key is None else [Security(HTTPBearer(auto_error=False))]
    app.include_router(router, dependencies=told)
    if metrics_app is not None:
        app.router.routes.append(Route("/metrics", _Forwarded(metrics_app), include_in_schema=False))
    _complete_description(app)
    build = app.build_middleware_stack  # `add_middleware` would not see the answers to unexpected errors
    app.build_middleware_stack = lambda: around(_behind(root_path, build()))  # type: ignore[method-assign]
    return app


def _behind(root_path: str, app: ASGIApp) -> ASGIApp:
    """The application with a path in front; a proxy may take it off before a request comes here, or leave it on."""

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = root_path
        await app(scope, receive, send)

    return behind if root_path else app


async def _nobody_reads(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


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
        self._key = key.encode()  # UTF-8, as clients must send it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path in OPEN_PATHS or self._opens(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        message = "The API key is missing or wrong; send it as `Authorization: Bearer KEY`."
        await error_response(ApiError(401, message, code="invalid_api_key"))(scope, receive, send)

    def _opens(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        sent = key.strip(" \t").encode("latin-1")  # the bytes that came: Starlette decodes headers so
        return scheme.lower() == "bearer" and compare_digest(sent, self._key)


def _complete_description(app: FastAPI) -> None:
    """Make the application's `/openapi.json` complete; its `state.service` is read when it is first requested."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(described(), app.state.service)
        return described()

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(description: dict[str, Any], service: Service) -> None:
    schemas = description["components"]["schemas"]
    models = [(chunk, "serialization") for chunk in STREAMED]
    _, chunks = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    for name, definition in chunks["$defs"].items():
        schemas.setdefault(name, definition)
    for path, operations in description["paths"].items():
        for operation in operations.values():
            if path in OPEN_PATHS:
                operation.pop("security", None)
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model":
                    parameter["schema"]["enum"] = list(service.names)
    for name in _BODIES:
        _add_limits(schemas[name]["properties"], service)


def _add_limits(properties: dict[str, Any], service: Service) -> None:
    """Add the model's names, vocabulary size and context length, and the most outputs of one request."""
    info = service.engine.info
    properties["model"]["enum"] = [None, *service.names]
    for field in ("prompt", "tokens", "stop_token_ids", "allowed_token_ids"):
        for item in _items(properties.get(field, {})):
            if item.get("type") == "integer":
                item |= {"minimum": 0, "maximum": info.vocab_size - 1}
    for kind in _kinds(properties, "array", "allowed_token_ids"):
        kind["maxItems"] = MAX_ALLOWED_OF_ALL
    for kind in _kinds(properties, "integer", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        kind["maximum"] = info.max_model_len - 1
    for kind in _kinds(properties, "integer", "seed", "top_k", "priority"):  # FastAPI rounds bounds, as floats
        kind |= {"minimum": max(int(kind["minimum"]), -(2**63)), "maximum": 2**63 - 1}
    for kind in _kinds(properties, "integer", "logprobs", "top_logprobs", "prompt_logprobs"):
        kind["maximum"] = service.max_logprobs
    for kind in _kinds(properties, "object", "logit_bias"):
        kind["propertyNames"] = {"pattern": f"^({_up_to(info.vocab_size - 1)})$"}
        kind["additionalProperties"] = {"type": "number", "minimum": -100, "maximum": 100}
    if "n" not in properties:
        return
    for kind in _kinds(properties, "array", "prompt"):
        if service.max_outputs_per_request is not None and kind["items"]["type"] != "integer":
            kind["maxItems"] = service.max_outputs_per_request
    if not service.tokenizer.encode(""):
        for text in (*_kinds(properties, "string", "prompt"), *_items(properties.get("prompt", {}))):
            if text["type"] == "string":
                text["minLength"] = 1


def _kinds(properties: dict[str, Any], kind: str, *names: str) -> Iterator[dict[str, Any]]:
    """The alternatives of some fields' schemas with type `kind`."""
    for schema in (properties.get(name, {}) for name in names):
        yield from (one for one in (*schema.get("anyOf", ()), schema) if one.get("type") == kind)


def _items(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Schemas of the items of a field's lists, nested lists included."""
    for kind in _kinds({"": schema}, "array", ""):
        yield kind["items"]
        yield from _items(kind["items"])


def _up_to(most: int) -> str:
    """A regular expression for the numbers from 0 to `most`, without leading zeros."""
    digits = str(most)
    options = [f"[1-9][0-9]{{{length - 1}}}" for length in range(1, len(digits))]
    for place, digit in enumerate(digits):
        least = 1 if place == 0 else 0
        if int(digit) > least:
            rest = len(digits) - place - 1
            options.append(f"{digits[:place]}[{least}-{int(digit) - 1}][0-9]{{{rest}}}")
    return "|".join(["0", *options, digits]) if most else "0"
