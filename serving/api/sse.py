"""Server-sent events, and work that ends when its client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.api.schema.errors import as_api_error, error_response

DONE = b"data: [DONE]\n\n"
COMMENT = b": the engines are being started again\n\n"
"""A line that clients ignore."""
Result = TypeVar("Result")


class ClientLeft(Exception):
    """The client closed its connection before it got the answer, so none is sent."""


def event(data: Any) -> bytes:
    """One server-sent event with its data as JSON. A NaN or infinity becomes null."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def named_event(name: str, data: Any) -> bytes:
    """As `event`, with the event's name."""
    return b"event: " + name.encode() + b"\n" + event(data)


async def until_client_leaves(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`; cancel it as soon as the client closes its connection.

    Args:
        receive: of the ASGI call, whose body was read already.

    Raises:
        ClientLeft: the client closed its connection first; the work was cancelled and has ended.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they are generated, then `done`.

    Nothing is sent before the first event, so an error before it is an ordinary response with its status. A later error
    is sent as an event. When the client leaves, the generator is closed at once.

    While engines are started again, a stream that has begun gets comments, so that no proxy takes it for a dead one.

    Args:
        done: follows the events.
        paused: whether engines are started again.
        comment_s: seconds between two comments.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], done: bytes = DONE, *, paused: Callable[[], bool], comment_s: float
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._done = events, done
        self._paused, self._comment_s = paused, comment_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        with suppress(ClientLeft):
            await until_client_leaves(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                first = await anext(events)
            except Exception as error:
                await error_response(as_api_error(error))(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send(_body(first))
            commenting = asyncio.create_task(self._comment(send))
            try:
                async for data in events:
                    await send(_body(data))
            except Exception as error:
                await send(_body(event(as_api_error(error).body)))
            finally:
                commenting.cancel()
                await asyncio.gather(commenting, return_exceptions=True)
            await send(_body(self._done))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _comment(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._comment_s)
            if self._paused():
                await send(_body(COMMENT))


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}
