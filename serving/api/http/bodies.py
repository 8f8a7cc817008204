"""Bodies of requests: the size limit, and strict parsing of JSON."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api.schema.errors import ApiError, error_response

__all__ = ["BodyLimit", "JsonRoute"]

_DISCARD_S = 1.0
"""How long the rest of a refused body is read and discarded, in seconds."""


class BodyLimit:
    """Middleware that answers 413 and closes the connection as soon as a body exceeds the limit."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received, more = 0, True
        said = Headers(scope=scope).get("content-length", "")
        too_large = said.isdecimal() and int(said) > self._max_bytes

        async def receive_some() -> Message:
            nonlocal received, too_large, more
            message = await receive()
            more = message.get("more_body", False)
            received += len(message.get("body", b""))
            too_large = received > self._max_bytes
            return {"type": "http.disconnect"} if too_large else message

        async def send_unless_too_large(message: Message) -> None:
            if not too_large:
                await send(message)

        if not too_large:
            await self._app(scope, receive_some, send_unless_too_large)
        if too_large:
            message = f"The body is larger than {self._max_bytes} bytes; send less, or raise --max-request-bytes."
            response = error_response(ApiError(413, message, code="request_too_large"))
            response.headers["Connection"] = "close"
            await send({"type": "http.response.start", "status": 413, "headers": response.raw_headers})
            await send({"type": "http.response.body", "body": response.body, "more_body": True})
            with suppress(TimeoutError):  # closing a connection with unread data would also lose the answer
                async with asyncio.timeout(_DISCARD_S):
                    while more:
                        more = (await receive()).get("more_body", False)
            await send({"type": "http.response.body", "body": b""})


def _number(text: str) -> int | float:
    """Convert a number with a point or an exponent. `26.0` becomes an integer, as JSON has only one kind of number."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"number out of range: {text[:40]}")
    return int(number) if number.is_integer() else number


_decoder = msgspec.json.Decoder(float_hook=_number)


class _JsonRequest(Request):
    async def json(self) -> Any:
        """The body, parsed.

        Raises:
            json.JSONDecodeError: it is not JSON, is nested too deeply, or has an invalid number or character.
        """
        try:
            return _decoder.decode(await self.body())
        except RecursionError:
            raise json.JSONDecodeError("it is nested too deeply", "", 0) from None
        except UnicodeDecodeError:
            raise json.JSONDecodeError("it is not UTF-8", "", 0) from None
        except msgspec.DecodeError as error:
            reason = "it ends early, or with an unpaired surrogate" if "truncated" in str(error) else str(error)
            raise json.JSONDecodeError(reason.removeprefix("JSON is malformed: "), "", 0) from None


class JsonRoute(APIRoute):
    """A route that parses JSON strictly: unpaired surrogates, NaN and numbers out of range are errors."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The function that answers a request."""
        answer = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await answer(_JsonRequest(request.scope, request.receive))

        return handle
