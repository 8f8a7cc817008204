"""Bodies of requests: their limits, and strict parsing of JSON.

Nothing here may hold the event loop for more than 50 ms, whatever a body has in it. To make lists and objects takes by
far the longest, so they are counted, piece by piece, before the body is parsed.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api.schema.errors import ApiError, error_response
from serving.api.schema.request_models import CheckedIds
from ubatch.errors import shown

MAX_VALUES = 2**20 + 2**16
"""Most values of a body, such as token ids; parsed in some 30 ms."""
MAX_PARTS = 2**15
"""Most lists, objects, strings (names of members, too), words, and numbers with a point or an exponent: each takes as
long as some 16 integers."""
MAX_DIGITS = 100
"""Most digits of a number; to read one takes the square of their number."""
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


_PIECE = 2**18
_PIECE_OF_IDS = 2**15
_PARTS = (b"[", b"{", b'"', b".", b"e", b"E")
_ALL_ONE = bytes.maketrans(b"023456789", b"1" * 9)


async def check_counts(body: bytes) -> None:
    """Check how much there is in a JSON body, without parsing it; the event loop goes on meanwhile.

    Raises:
        ApiError: 400, more than `MAX_VALUES`, `MAX_PARTS` or `MAX_DIGITS`.
    """
    values = parts = 0
    for piece in _outside_strings(body):
        values += piece.count(b",") + piece.count(b"[") + piece.count(b"{")
        parts += sum(piece.count(sign) for sign in _PARTS)
        what = None
        if values > MAX_VALUES:
            what = f"{MAX_VALUES} values; send text in place of token ids, or fewer prompts"
        elif parts > MAX_PARTS:
            what = f"{MAX_PARTS} lists, objects and strings; send fewer in one body"
        elif b"1" * (MAX_DIGITS + 1) in piece.translate(_ALL_ONE):
            what = f"{MAX_DIGITS} digits in one number"
        if what is not None:
            raise ApiError(400, f"The body has more than {what}.", code="body_too_complex")
        if len(body) > _PIECE:
            await asyncio.sleep(0)


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """A JSON body in pieces, with a quotation mark in place of each string."""
    begin, inside = 0, 0
    while begin < len(body):
        piece = body[begin : begin + _PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # do not cut between a backslash and what it escapes
            piece = body[begin : begin + _PIECE + 1]
        begin += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b'"'.join(parts[inside::2])
        inside = (inside + len(parts) - 1) % 2


async def check_ids(parsed: Any) -> Any:
    """Check long lists of token ids in pieces, with turns of the event loop between them; the body with `CheckedIds`.

    Raises:
        ApiError: 400, an item is no token id.
    """
    if isinstance(parsed, dict):
        for name in {"prompt", "allowed_token_ids", "tokens"} & parsed.keys():
            parsed[name] = await _checked(parsed[name], name)
    return parsed


async def _checked(value: Any, place: str) -> Any:
    if not isinstance(value, list) or not value:
        return value
    if isinstance(value[0], list):
        return [await _checked(each, f"{place}.{number}") for number, each in enumerate(value)]
    if not isinstance(value[0], int) or len(value) < _PIECE_OF_IDS:
        return value
    for begin in range(0, len(value), _PIECE_OF_IDS):
        piece = value[begin : begin + _PIECE_OF_IDS]
        if {*map(type, piece)} != {int} or min(piece) < 0:
            index, wrong = next((n, each) for n, each in enumerate(piece, begin) if type(each) is not int or each < 0)
            message = f"{place}.{index}: Input should be a token id, an integer from 0, not {shown(wrong)}."
            raise ApiError(400, message, param=f"{place}.{index}")
        await asyncio.sleep(0)
    return CheckedIds(value)


_decoder = msgspec.json.Decoder(float_hook=_number)


class _JsonRequest(Request):
    parsed: Any = None
    """The body of a large request, which was parsed and checked already."""

    async def json(self) -> Any:
        """The body, parsed.

        Raises:
            json.JSONDecodeError: it is not JSON, is nested too deeply, or has an invalid number or character.
        """
        return _parse(await self.body()) if self.parsed is None else self.parsed

    async def look_at(self) -> None:
        """Check what takes long to parse or to check.

        Raises:
            ApiError: 400, the body has too much in it, or a wrong token id.
        """
        try:
            body = await self.body()
        except ClientDisconnect:
            raise ApiError(400, "The client left before the body was complete.") from None
        await check_counts(body)
        if len(body) > _PIECE:
            with suppress(json.JSONDecodeError):  # told where it is parsed again
                self.parsed = _parse(body)
            await asyncio.sleep(0)
            self.parsed = await check_ids(self.parsed)


def _parse(body: bytes) -> Any:
    try:
        return _decoder.decode(body)
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
            read = _JsonRequest(request.scope, request.receive)
            await read.look_at()
            return await answer(read)

        return handle
