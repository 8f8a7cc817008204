"""Errors as OpenAI's clients expect them: a status and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from itertools import islice
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from attention import KVCacheExhausted
from model_runner import RequestError
from serving.logs import request_id
from serving.requests import EngineDead, QueueFull
from ubatch import UBatchError

__all__ = ["UNSUPPORTED", "ApiError", "add_error_handlers", "as_api_error", "error_response", "shown", "shutting_down"]

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
UNSUPPORTED = "unsupported"  # the type of a validation error that a field asks for what is not done
SHOWN_CHARACTERS = 80  # of a wrong value


class _Brief(reprlib.Repr):
    """Looks at the beginning of a mapping only: reprlib's own sorts all of it first."""

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), SHOWN_CHARACTERS)), level)


_brief = _Brief()
_brief.maxstring = _brief.maxlong = _brief.maxother = 2 * SHOWN_CHARACTERS
_brief.maxlist = _brief.maxdict = SHOWN_CHARACTERS


class ApiError(UBatchError):
    """A request is answered with an error.

    Args:
        status: of the HTTP response.
        message: what is wrong and what to do.
        param: the request's field that is wrong.
        code: what a program can tell the error by.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that says it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        own = request_id.get()
        return {"error": error if own is None else {**error, "request_id": own}}


def shutting_down() -> ApiError:
    """What is answered once the server drains."""
    return ApiError(503, "The server is shutting down and takes no new requests.", code="shutting_down")


def shown(value: object) -> str:
    """A wrong value as a message shows it: its beginning, however large or deep it is."""
    text = _brief.repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def as_api_error(error: Exception) -> ApiError:
    """What the client is told of any error; one that nobody expected is logged here and not told."""
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
        case _:
            logger.error("a request failed", exc_info=error)
            return ApiError(500, "The server failed at this request; its log says why.")


def error_response(error: ApiError) -> Response:
    """The response that says it; 503 with `Retry-After`."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status == HTTPStatus.SERVICE_UNAVAILABLE else {}
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    content = msgspec.json.encode(error.body)
    return Response(content, status_code=error.status, headers=headers, media_type="application/json")


def add_error_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Every error of the application, FastAPI's own too, gets OpenAI's body.

    Args:
        app: the application.
        routes: all that it has besides its own.
    """

    async def handle(request: Request, error: Exception) -> Response:
        match error:
            case RequestValidationError():
                return error_response(_validation_error(error.errors()))
            case HTTPException():
                message = f"{error.detail}: {request.method} {request.url.path}"
                response = error_response(ApiError(error.status_code, message))
                response.headers.update(error.headers or {})
                if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
                    response.headers["Allow"] = ", ".join(_methods(request, [*app.routes, *routes]))
                return response
            case _:
                return error_response(as_api_error(error))

    for kind in (UBatchError, Exception, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)


def _methods(request: Request, routes: Sequence[BaseRoute]) -> list[str]:
    """What may be done at a path, by any of its routes: the first one alone answers that a method is not allowed."""
    there = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in there for method in getattr(route, "methods", None) or ()})


def _validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's errors; the others are often the same one, seen by another branch."""
    first = errors[0]
    if first["type"] == UNSUPPORTED:
        return ApiError(400, f"{first['msg']}.", param=first["ctx"]["param"])
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"The body is not valid JSON: {reason}.")
    place = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(place) or None
    if first["type"] == "missing":
        return ApiError(400, f"{param or 'the body'} is missing.", param=param)
    if isinstance(first.get("input"), bytes):  # FastAPI hands on what it was not told to read as JSON
        return ApiError(400, "The body is read only if it is JSON and says so: Content-Type: application/json.")
    if first["type"] == "too_short":
        return ApiError(400, f"{param}: Input should not be empty.", param=param)
    message = f"{param or 'the body'}: {first['msg']}"
    if "actual_length" not in first.get("ctx", {}):  # else pydantic has said how many there are: no need for the list
        message += f", not {shown(first.get('input'))}"
    return ApiError(400, f"{message}.", param=param)
