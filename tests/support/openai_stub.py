"""A stand-in for an OpenAI-compatible server, for the load generator: it answers `w0 w1 ...`, a word a token.

What a prompt's first token asks for goes wrong: see `Wrong`.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

VOCABULARY = 50


class Wrong(IntEnum):
    """First prompt tokens that the stub answers wrongly."""

    REFUSED = 1001
    ERROR_IN_STREAM = 1002
    NO_DONE = 1003
    NOT_JSON = 1004


@dataclass
class Stub:
    """What the server saw.

    Attributes:
        bodies: every request for a completion.
        active, peak: requests at once, now and at most.
        dropped: streams whose client went away.
        pause_s: between two tokens.
        usage: answers say how many tokens there were.
        tokenize: there is a /tokenize.
        api_key: asked for, where given.
    """

    bodies: list[dict[str, Any]] = field(default_factory=list)
    active: int = 0
    peak: int = 0
    dropped: int = 0
    pause_s: float = 0.001
    usage: bool = True
    tokenize: bool = True
    api_key: str | None = None
    url: str = ""


def _app(stub: Stub) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def check_key(request: Request, call_next: Any) -> Response:
        if stub.api_key is not None and request.headers.get("authorization") != f"Bearer {stub.api_key}":
            return JSONResponse({"error": {"message": "wrong key"}}, 401)
        response: Response = await call_next(request)
        return response

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "stub", "max_model_len": 512}, {"id": "other"}]}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        if not stub.tokenize:
            return JSONResponse({"detail": "Not Found"}, 404)
        words = (await request.json())["prompt"].split()
        return JSONResponse({"tokens": [index % VOCABULARY for index in range(len(words))]})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        return {"prompt": " ".join(f"t{token}" for token in (await request.json())["tokens"])}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(stub, await request.json(), chat=False)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(stub, await request.json(), chat=True)

    return app


async def _answer(stub: Stub, body: dict[str, Any], *, chat: bool) -> Response:
    stub.bodies.append(body)
    first = 0 if chat else body["prompt"][0]
    if first == Wrong.REFUSED:
        return JSONResponse({"error": {"message": "not today", "type": "invalid_request_error"}}, 400)
    if first == Wrong.NOT_JSON:
        return Response("nonsense")
    words = [f"w{index} " for index in range(body["max_tokens"])]
    prompt = body["messages"][0]["content"].split() if chat else body["prompt"]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(words)} if stub.usage else None
    if body["stream"]:
        return StreamingResponse(_events(stub, words, usage, first, chat), media_type="text/event-stream")
    stub.active += 1
    stub.peak = max(stub.peak, stub.active)
    await asyncio.sleep(stub.pause_s * len(words))
    stub.active -= 1
    text = "".join(words)
    choice = {"message": {"content": text}} if chat else {"text": text}
    return JSONResponse({"choices": [choice | {"finish_reason": "length"}], "usage": usage})


async def _events(
    stub: Stub, words: list[str], usage: dict[str, int] | None, first: int, chat: bool
) -> AsyncIterator[bytes]:
    stub.active += 1
    stub.peak = max(stub.peak, stub.active)
    try:
        if chat:
            yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for index, word in enumerate(words):
            await asyncio.sleep(stub.pause_s)
            reason = "length" if index == len(words) - 1 else None
            choice: dict[str, Any] = {"delta": {"content": word}} if chat else {"text": word}
            yield _event({"choices": [choice | {"finish_reason": reason}], "usage": None})
            if first == Wrong.ERROR_IN_STREAM:
                yield _event({"error": {"message": "the engine died"}})
                return
        if usage is not None:
            yield _event({"choices": [], "usage": usage})
        if first != Wrong.NO_DONE:
            yield b"data: [DONE]\n\n"
    except asyncio.CancelledError:
        stub.dropped += 1
        raise
    finally:
        stub.active -= 1


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def serve_stub(port: int) -> None:
    """Be the stub, on this port, until SIGTERM; it has a `/health`."""
    app = _app(Stub())
    app.get("/health")(lambda: None)
    uvicorn.run(app, port=port, log_config=None, ws="none", lifespan="off")


@contextmanager
def running_stub() -> Iterator[Stub]:
    """The stub on a free port, in a thread of its own."""
    stub = Stub()
    server = uvicorn.Server(uvicorn.Config(_app(stub), port=0, log_config=None, ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the stub did not start")
            threading.Event().wait(0.01)
        stub.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield stub
    finally:
        server.should_exit = True
        thread.join(20)
