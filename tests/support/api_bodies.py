"""Short bodies of what generates, what is refused of bodies, and calls whose answers are read as they are written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from api_clients import CHAT, COMPLETIONS, app_of, post
from fake_engine import FakeEngine
from fastapi import FastAPI

RESPONSES = "/v1/responses"
BODIES: Mapping[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 3},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    RESPONSES: {"input": "a", "max_output_tokens": 3},
}


def refused(engine: FakeEngine | FastAPI, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error for a body that must be refused before the engine hears of it."""
    app = engine if isinstance(engine, FastAPI) else app_of(engine)
    requests = app.state.service.engine.requests
    before = len(requests)
    response = post(app, path, body)
    assert response.status_code == status, response.text
    assert len(requests) == before
    error: dict[str, Any] = response.json()["error"]
    return error


class Exchange:
    """One call of an application, whose answer is read while it is written. Made on a running loop."""

    def __init__(self, app: FastAPI, path: str, body: Mapping[str, Any]) -> None:
        self._body: bytes | None = json.dumps(body).encode()
        self._sent: asyncio.Queue[Any] = asyncio.Queue()
        self._left = asyncio.Event()
        headers = [(b"content-type", b"application/json"), (b"host", b"test")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        self.running = asyncio.create_task(app(scope, self._receive, self._sent.put))

    async def _receive(self) -> Any:
        if self._body is None:
            await self._left.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def status(self) -> int:
        """Wait for the answer's status."""
        status: int = (await self._sent.get())["status"]
        return status

    async def part(self) -> bytes:
        """Wait for the next part of the answer; empty at its end."""
        data: bytes = (await self._sent.get())["body"]
        return data

    async def rest(self) -> bytes:
        """All parts up to the end."""
        parts = [await self.part()]
        while parts[-1]:
            parts.append(await self.part())
        return b"".join(parts)

    async def leave(self) -> None:
        """Close the connection, and wait until that was noticed."""
        self._left.set()
        await self.running
