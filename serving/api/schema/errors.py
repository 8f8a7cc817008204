"""Errors as OpenAI's clients expect them: a status and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from attention import KVCacheExhausted
from model_runner import RequestError
from serving.api.schema.not_offered import elsewhere, why_not
from serving.engine.restarts import Pause
from serving.logs import request_id
from serving.requests import EngineDead, EngineRestarting, PoisonousRequest, QueueFull
from ubatch import UBatchError
from ubatch.errors import SHOWN_CHARACTERS, cut, shown

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
POISONOUS = "poisonous_request"
UNSUPPORTED = "unsupported"  # type of the validation error for an unsupported field


class ApiError(UBatchError):
    """An error that is sent to the client.

    Args:
        code: identifies the kind of error, for programs.
        retry_after_s: when to try again, with status 503.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """The error as a JSON object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        own = request_id.get()
        return {"error": error if own is None else {**error, "request_id": own}}


def shutting_down() -> ApiError:
    """The error for new requests while the server shuts down."""
    return ApiError(503, "The server is shutting down and takes no new requests.", code="shutting_down")


def engine_dead(error: EngineDead) -> ApiError:
    """The error for whoever asks for the engines after their end."""
    return ApiError(503, f"The engine is dead: {error}", code="engine_dead")


def restarting(pause: Pause) -> ApiError:
    """The error for whoever asks whether engines serve while they are started again."""
    left_s = math.ceil(pause.left_s)
    message = f"The engines are being started again, which should take another {left_s} s: {pause.reason}"
    return ApiError(503, message, code="engine_restarting", retry_after_s=left_s)


def as_api_error(error: Exception) -> ApiError:
    """The error that the client gets for any exception. An unexpected one is logged, and its text is not sent."""
    match error:
        case ApiError():
            return error
        case KVCacheExhausted():
            return ApiError(400, str(error), code="context_length_exceeded")
        case RequestError():
            return ApiError(400, str(error), param=error.param)
        case QueueFull():
            return ApiError(503, str(error), code="queue_full")
        case EngineDead():
            return ApiError(500, str(error), code="engine_dead")
        case EngineRestarting():
            return ApiError(503, str(error), code="engine_restarting", retry_after_s=error.retry_after_s)
        case PoisonousRequest():
            return ApiError(500, str(error), code=POISONOUS)
        case _:
            logger.error("a request failed", exc_info=error)
            return ApiError(500, "The server failed during this request; its log says why.")


def error_response(error: ApiError) -> Response:
    """The HTTP response for an error; 503 has `Retry-After`, in whole seconds. OpenAI's clients try again after every
    other 500; not a request that would kill engines again."""
    retry_after = {"Retry-After": str(math.ceil(error.retry_after_s))}
    headers = retry_after if error.status == HTTPStatus.SERVICE_UNAVAILABLE else {}
    if error.code == POISONOUS:
        headers["X-Should-Retry"] = "false"
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    content = msgspec.json.encode(error.body)
    return Response(content, status_code=error.status, headers=headers, media_type="application/json")


def add_error_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Give every error of the application OpenAI's body, including FastAPI's own errors.

    Args:
        routes: the included router's routes, which `app.routes` may lack.
    """

    async def handle(request: Request, error: Exception) -> Response:
        match error:
            case RequestValidationError():
                return error_response(validation_error(error.errors(), error.body))
            case HTTPException(status_code=HTTPStatus.NOT_FOUND):
                return error_response(_unknown_path(request, [*app.routes, *routes]))
            case HTTPException():
                message = f"{error.detail}: {request.method} {cut(request.url.path)}"
                response = error_response(ApiError(error.status_code, message))
                response.headers.update(error.headers or {})
                if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
                    response.headers["Allow"] = ", ".join(_methods(request, [*app.routes, *routes]))
                return response
            case _:
                return error_response(as_api_error(error))

    for kind in (UBatchError, Exception, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)


def _unknown_path(request: Request, routes: Sequence[BaseRoute]) -> ApiError:
    """The error for a path that there is not; never `model_not_found`, which clients take it for without a code."""
    path, shown_path = request.url.path, cut(request.url.path)
    if (why := why_not(path)) is not None:
        return ApiError(404, f"{shown_path} is not offered: {why}.", code="endpoint_not_offered")
    there = elsewhere(path, {getattr(route, "path", "") for route in routes})
    instead = "/openapi.json lists what there is" if there is None else f"use {there}, and check the client's base URL"
    return ApiError(404, f"There is no {request.method} {shown_path}; {instead}.", code="unknown_endpoint")


def _methods(request: Request, routes: Sequence[BaseRoute]) -> list[str]:
    """All HTTP methods of a path. Starlette's 405 names only those of the path's first route."""
    there = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in there for method in getattr(route, "methods", None) or ()})


def validation_error(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """The first of pydantic's errors; the others are often the same error in another branch of a union.

    Args:
        body: what was validated.
    """
    first = errors[0]
    if first["type"] == UNSUPPORTED:
        return ApiError(400, f"{first['msg']}.", param=first["ctx"]["param"])
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"The body is not valid JSON: {reason}.")
    parts = first["loc"][first["loc"][:1] == ("body",) :]
    place = [cut(str(part), SHOWN_CHARACTERS) for part in _sent(parts, body, missing=first["type"] == "missing")]
    param = ".".join(place) or None
    if first["type"] == "missing":
        return ApiError(400, f"{param or 'the body'} is missing.", param=param)
    if isinstance(first.get("input"), bytes):  # without a JSON content type FastAPI passes the body on as bytes
        return ApiError(400, "Send the body as JSON, with the header Content-Type: application/json.")
    if first["type"] == "too_short":
        return ApiError(400, f"{param}: Input should not be empty.", param=param)
    message = f"{param or 'the body'}: {first['msg']}"
    if "actual_length" not in first.get("ctx", {}):  # otherwise pydantic's message has the length: omit the list
        message += f", not {shown(first.get('input'))}"
    return ApiError(400, f"{message}.", param=param)


def _sent(place: Sequence[int | str], body: Any, *, missing: bool) -> Iterator[int | str]:
    """The parts of an error's place that are in the body; the others name branches of unions.

    Args:
        missing: the last part is not there.
    """
    for number, part in enumerate(place):
        match body:
            case Mapping() if part in body:
                body = body[part]
            case list() if isinstance(part, int):
                body = body[part]
            case _ if not missing or number < len(place) - 1:
                continue
        yield part
