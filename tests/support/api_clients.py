"""Talking to an application without a network, and over a real server; short bodies, and what is refused of bodies."""

import asyncio
import json
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any

import httpx
import uvicorn
from fake_engine import FakeEngine
from fastapi import FastAPI
from repository import TINY_MOE
from starlette.datastructures import State

from serving.api import Service, create_app
from serving.requests import DraftCounts, RequestInput
from serving.text.tokenizer import load_tokenizer

MODEL = "tiny"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKS: Mapping[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
}
"""The shortest body of each."""
RESPONSES = "/v1/responses"
BODIES: Mapping[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 3},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    RESPONSES: {"input": "a", "max_output_tokens": 3},
}
JSON = {"Content-Type": "application/json"}
SECONDS_TO_START = 60.0


class Recorder:
    """In place of `RequestMetrics`: it remembers."""

    def __init__(self) -> None:
        self.prompts: dict[str, int] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self.drafted: dict[str, DraftCounts] = defaultdict(DraftCounts)
        self.reasons: list[str] = []

    def started(self, request: RequestInput, siblings: object) -> None:
        self.prompts[request.request_id] = len(request.token_ids)

    def began(self, request_id: str, cached_tokens: int, times: object) -> None:
        """Not of interest."""

    def tokens(self, request_id: str, count: int) -> None:
        self.counts[request_id] += count

    def drafts(self, request_id: str, counts: DraftCounts) -> None:
        self.drafted[request_id] += counts

    def grammar(self, outcome: str) -> None:
        self.reasons.append(outcome)

    def finished(self, request_id: str, reason: str) -> None:
        assert request_id in self.prompts
        self.reasons.append(reason)


@cache
def tokenizer() -> Any:
    """The committed checkpoint's, loaded once."""
    return load_tokenizer(TINY_MOE)


def says(text: str) -> Any:
    """A reply: this text, then the end of sequence."""
    ids = [*tokenizer().encode(text), 0]
    return lambda request: ids


def app_of(engine: FakeEngine, *, described: bool = False, **options: Any) -> FastAPI:
    """The application under test; only one that is `described` may be asked for `/openapi.json`."""
    own = ("api_key", "max_request_bytes", "metrics_app", "around", "root_path", "describes", "cross_origin")
    around = {name: options.pop(name) for name in own if name in options}
    fake: Any = engine
    service = Service(fake, tokenizer(), **{"names": (MODEL,), **options})
    if described or around:
        return create_app(service, **around)
    app = copy(_plain_app())
    app.state = State({"service": service})
    return app


def app_with(template: Any, engine: FakeEngine) -> FastAPI:
    """The application with another chat template."""
    app = app_of(engine)
    own = app.state.service.tokenizer = load_tokenizer(TINY_MOE)
    own.chat_template = template
    return app


def client_of(app: FastAPI) -> httpx.AsyncClient:
    """A client of the application, without a network."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=100)


@cache
def _plain_app() -> FastAPI:
    """Made once, for FastAPI to look at its routes once; a copy with another state is another application."""
    nobody: Any = None
    return create_app(Service(nobody, tokenizer(), names=()))


def call(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    """One request, without a network."""

    async def run() -> httpx.Response:
        async with client_of(app) as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def post(engine: FakeEngine | FastAPI, path: str, body: Any, **options: Any) -> httpx.Response:
    """One POST of JSON."""
    app = engine if isinstance(engine, FastAPI) else app_of(engine)
    return call(app, "POST", path, json=body, **options)


def post_bytes(app: FastAPI, path: str, content: Any) -> httpx.Response:
    """One POST of what should be JSON."""
    return call(app, "POST", path, content=content, headers={"Content-Type": "application/json"})


def complete(engine: FakeEngine | FastAPI, body: Mapping[str, Any]) -> dict[str, Any]:
    """A completion that must be answered."""
    response = post(engine, "/v1/completions", {"model": MODEL, "prompt": "Hello", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def chat(engine: FakeEngine | FastAPI, body: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completion that must be answered."""
    messages = [{"role": "user", "content": "Hello"}]
    response = post(engine, "/v1/chat/completions", {"model": MODEL, "messages": messages, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(engine: FakeEngine | FastAPI, path: str, body: Mapping[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The events of a stream, which must be exact server-sent events that end with `[DONE]`."""
    defaults = {"prompt": "Hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    response = post(engine, path, {"model": MODEL, "stream": True, **defaults, **body}, **options)
    assert response.status_code == 200, response.text
    return events_of(response)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream's events."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def token_ids(request: RequestInput) -> list[int]:
    """A prompt as a list."""
    return list(request.token_ids)


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """A real server on a free port; yields its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, args=([listener],), name="api server")
    thread.start()
    try:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        httpx.get(f"{address}/health", timeout=SECONDS_TO_START)
        yield address
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


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
