"""A server's connections: too many of them, half a request, no file descriptors; and its address."""

import asyncio
import errno
import logging
import resource
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvicorn
from api_clients import app_of
from fake_engine import FakeEngine

from serving.api.http import connections
from serving.api.http.connections import (
    CannotListen,
    Listener,
    connection_protocol,
    listening,
    most_connections,
    raise_file_limit,
)
from serving.api.request_log import RequestLog

GET = b"GET /health HTTP/1.1\r\nHost: here\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": [5]}'
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
Ask = Callable[..., Coroutine[Any, Any, bytes]]


def serve(scenario: Callable[[Listener, Ask], Coroutine[Any, Any, None]], most: int = 100) -> None:
    """Run a scenario against a server; `ask` sends some bytes, and gives all that comes until the end."""

    async def run() -> None:
        with listening("127.0.0.1", 0) as listener:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(Listener.spare_traceback)
            config = uvicorn.Config(
                app_of(FakeEngine()), log_config=None, lifespan="off", http=connection_protocol(most, RequestLog)
            )
            server = uvicorn.Server(config)
            server.capture_signals = lambda: pytest.MonkeyPatch.context()  # type: ignore[method-assign,assignment,return-value]
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.01)

            async def ask(*parts: bytes, pause_s: float = 0.0) -> bytes:
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                for part in parts:
                    writer.write(part)
                    await asyncio.sleep(pause_s)
                answer = await asyncio.wait_for(reader.read(), 20)
                writer.close()
                return answer

            try:
                await scenario(listener, ask)
            finally:
                server.should_exit = True
                await serving

    asyncio.run(run())


def test_headers_that_do_not_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 2.0)

    async def scenario(listener: Listener, ask: Ask) -> None:
        begun = time.monotonic()
        half, nothing, later = await asyncio.gather(
            ask(GET), ask(), ask(GET + b"Connection: keep-alive\r\n\r\n", GET, pause_s=0.1)
        )
        assert time.monotonic() - begun < 15
        assert half.startswith(b"HTTP/1.1 408 ")
        assert nothing == b""
        assert later.startswith(b"HTTP/1.1 200 ")
        assert later.count(b"HTTP/1.1 408 ") == 1
        slowly = await ask(GET, b"Connection: close\r\n", b"\r\n", pause_s=0.1)
        assert slowly.startswith(b"HTTP/1.1 200 ")

    serve(scenario)


@pytest.mark.wide
def test_bodies_that_do_not_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_S", 1.0)
    head, body = POST + b"Connection: close\r\n", BODY
    whole = head + LENGTH
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"

    async def scenario(listener: Listener, ask: Ask) -> None:
        begun = time.monotonic()
        answers = await asyncio.gather(ask(whole), ask(whole, body[:5]), ask(chunked, b"5\r\n" + body[:5] + b"\r\n"))
        assert time.monotonic() - begun < 15
        assert [answer.count(b"HTTP/1.1 408 ") for answer in answers] == [1, 1, 1]
        slowly = await ask(whole, body[:3], body[3:5], body[5:9], body[9:], pause_s=0.5)  # 2 s in all
        assert slowly.startswith(b"HTTP/1.1 200 ")

    serve(scenario)


@pytest.mark.wide
def test_a_body_that_drips_has_a_total_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_S", 1.0)
    monkeypatch.setattr(connections, "WHOLE_BODY_S", 2.0)
    body, whole = BODY, POST + LENGTH
    drops = [body[place : place + 1] for place in range(len(body))]

    async def scenario(listener: Listener, ask: Ask) -> None:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        begun = time.monotonic()
        writer.write(whole)

        async def drip() -> None:
            for drop in drops:
                writer.write(drop)
                await asyncio.sleep(0.4)

        dripping = asyncio.create_task(drip())
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert 1.5 < time.monotonic() - begun < 5.5  # all drops would take 6 s
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)
        writer.close()
        # Each body has its own time: three of them on one connection take longer than the time of one.
        half = (whole + body[:5], body[5:])
        last = whole.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        several = await ask(*half, *half, last + body[:5], body[5:], pause_s=0.7)
        assert several.count(b"HTTP/1.1 200 ") == 3

    serve(scenario)


def test_connections_beyond_the_limit_get_503() -> None:
    async def scenario(listener: Listener, ask: Ask) -> None:
        whole = GET + b"Connection: close\r\n\r\n"
        idle = [await asyncio.open_connection(*listener.getsockname()) for _ in range(2)]
        refused = await ask(GET + b"\r\n")  # it would like to stay
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in refused.lower()
        assert b'"too_many_connections"' in refused
        assert b"x-request-id: " in refused.lower()
        for _, writer in idle:
            writer.close()
            await writer.wait_closed()
        answer, ends = b"", time.monotonic() + 10
        while not answer.startswith(b"HTTP/1.1 200 ") and time.monotonic() < ends:
            answer = await ask(whole)
        assert answer.startswith(b"HTTP/1.1 200 ")

    serve(scenario, most=2)


@pytest.mark.wide
def test_without_file_descriptors_it_accepts_later_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls, accept = 0, socket.socket.accept

    def exhausted(self: socket.socket) -> Any:
        nonlocal calls
        calls += 1
        raise OSError(errno.EMFILE, "Too many open files")

    async def scenario(listener: Listener, ask: Ask) -> None:
        monkeypatch.setattr(socket.socket, "accept", exhausted)
        asked = asyncio.create_task(ask(GET + b"Connection: close\r\n\r\n"))
        await asyncio.sleep(1.5)
        assert 2 <= calls <= 6
        monkeypatch.setattr(socket.socket, "accept", accept)
        assert (await asked).startswith(b"HTTP/1.1 200 ")

    with caplog.at_level(logging.WARNING):
        serve(scenario)
    assert [record.getMessage() for record in caplog.records] == [
        'no connection can be accepted error="Too many open files"'
    ]


@pytest.fixture
def file_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("file_limit")
def test_the_soft_limit_of_files_is_raised() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    files = raise_file_limit()
    assert 256 < files == resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 65535
    assert raise_file_limit() == files
    assert most_connections(1024) == 896
    assert most_connections(100) == 50


def test_addresses_that_cannot_be_had() -> None:
    with listening("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        message = rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use\. Choose another --port"
        with pytest.raises(CannotListen, match=message), listening("127.0.0.1", port):
            pass
    message = r"cannot listen on no\.such\.host\.invalid: .*--host"
    with pytest.raises(CannotListen, match=message), listening("no.such.host.invalid", 0):
        pass
