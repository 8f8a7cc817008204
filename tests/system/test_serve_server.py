"""Starting and draining, without engines: what is waited for, and what ends the waiting."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from api_clients import COMPLETIONS, app_of
from fake_engine import FakeEngine
from repository import TINY_MOE
from served import signals_kept

from serving import server
from serving.api.sse import COMMENT
from serving.engine.restarts import Pause
from serving.options import Command, resolve_settings, to_engine_options
from serving.options.sources import read_keywords
from serving.requests import EngineDead
from serving.server import _Serve, _Stop, _unless
from serving.text.tokenizer import load_tokenizer
from ubatch import ConfigError


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    with signals_kept():
        yield


@contextmanager
def serve_of(**keywords: Any) -> Iterator[_Serve]:
    """A server that has a socket, and has started nothing."""
    settings = resolve_settings(read_keywords({"model": TINY_MOE, **keywords}), gpus=0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield _Serve(Command(settings, to_engine_options(settings), False, ()), listener, 1024)


def finish(client: Any, died: asyncio.Future[Any]) -> None:
    client.num_outstanding = 0


def die(client: Any, died: asyncio.Future[Any]) -> None:
    died.set_result(EngineDead("rank 0 was killed."))


def nothing(client: Any, died: asyncio.Future[Any]) -> None:
    pass


@pytest.mark.parametrize(
    ("happens", "drain_timeout_s", "left"), [(finish, 600.0, 0), (die, 600.0, 1), (nothing, 0.1, 1)]
)
async def test_draining_ends(
    happens: Callable[[Any, asyncio.Future[Any]], None], drain_timeout_s: float, left: int
) -> None:
    """A server with one request, while something happens a moment later."""
    client: Any = SimpleNamespace(num_outstanding=1)
    service: Any = SimpleNamespace(draining=False)
    second: list[int] = []
    stop = _Stop(second.append)
    died: Any = asyncio.get_running_loop().create_future()
    signal.raise_signal(signal.SIGTERM)
    await asyncio.wait_for(stop.came.wait(), 30)
    with serve_of(drain_timeout_s=drain_timeout_s) as serve:
        asyncio.get_running_loop().call_later(0.05, happens, client, died)
        await asyncio.wait_for(serve._drain(client, service, stop, died), 30)
    assert service.draining
    signal.raise_signal(signal.SIGINT)
    await asyncio.sleep(0.01)
    assert second == [signal.SIGINT]
    assert client.num_outstanding == left


def give_template(monkeypatch: pytest.MonkeyPatch, made: Callable[[str], Any]) -> None:
    """The tokenizer has another chat template, made of its own."""

    def load(model: Path, chat_template: str | None) -> Any:
        tokenizer = load_tokenizer(model)
        tokenizer.chat_template = made(tokenizer.chat_template)
        return tokenizer

    monkeypatch.setattr(server, "load_tokenizer", load)


def test_a_broken_chat_template_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any engine starts."""
    give_template(monkeypatch, lambda own: "{% if %}")
    monkeypatch.delattr(server.EngineClient, "start")
    monkeypatch.setattr(server, "_Stop", lambda _: SimpleNamespace(first=asyncio.Event()))
    with serve_of() as serve, pytest.raises(ConfigError, match="chat template"):
        asyncio.run(serve.run())


def test_the_chosen_one_of_named_templates_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A set without a default stops no server."""

    async def start(options: object, *, engine_main: object) -> None:
        raise EngineDead("far enough")

    give_template(monkeypatch, lambda own: {"tool_use": own, "rag": "{{ documents }}"})
    monkeypatch.setattr(server.EngineClient, "start", start)
    monkeypatch.setattr(server, "_Stop", lambda _: SimpleNamespace(came=asyncio.Event()))
    with serve_of() as serve, caplog.at_level("INFO"), pytest.raises(EngineDead, match="far enough"):
        asyncio.run(serve.run())
    assert "chat template tool_use" in caplog.text


async def test_work_is_called_off_and_waited_for() -> None:
    ended: list[str] = []

    async def work(after_s: float = 0.05) -> str:
        try:
            await asyncio.sleep(after_s)
            return "done"
        finally:
            ended.append("work")

    event = asyncio.Event()
    assert await _unless(event, work()) == "done"
    event.set()
    assert await _unless(event, work()) is None
    assert ended == ["work", "work"]
    event.clear()
    asyncio.get_running_loop().call_later(0.01, event.set)
    assert await _unless(event, work(after_s=60)) is None
    assert ended == ["work", "work", "work"]


# -- a server that is told to end while its engines are started again, over HTTP ---------------------------------------

BODY = {"prompt": "a", "max_tokens": 3, "stream": True}
PAUSE = Pause("rank 0 was killed by SIGKILL.", 0.0, 10.0)


class Client(FakeEngine):
    """A client whose engines serve one token, and are started again then."""

    def __init__(self) -> None:
        super().__init__(hold=asyncio.Event(), hold_after=1)
        self.died: asyncio.Future[EngineDead] = asyncio.get_running_loop().create_future()
        self.pids: dict[int, int] = {}
        self.info: Any = SimpleNamespace(max_model_len=512, vocab_size=2048, memory="")

    @property
    def num_outstanding(self) -> int:
        """Requests that have not ended."""
        return len(self.alive)

    async def wait_dead(self) -> EngineDead:
        """As of `EngineClient`."""
        return await asyncio.shield(self.died)

    def serve(self) -> None:
        """The engines are back."""
        self.pause = None
        self.hold.set()

    def die(self) -> None:
        """They are not."""
        self.pause, self.dead = None, EngineDead("rank 0 was killed by SIGKILL.")
        self.hold.set()
        self.died.set_result(self.dead)


class Running:
    """A server on a free port, and a stream of it that pauses."""

    def __init__(self) -> None:
        self.client, self.second = Client(), asyncio.Event()
        self.stop = _Stop(lambda _: self.second.set())
        self.app = app_of(self.client, comment_s=0.001)

    @classmethod
    @asynccontextmanager
    async def told_to_end(cls, **settings: Any) -> AsyncIterator[Running]:
        """One that has served a stream up to its pause."""
        self = cls()
        with serve_of(**settings) as life:
            client: Any = self.client
            self.serving = asyncio.create_task(life._serve(client, self.app, self.stop))
            url = f"http://127.0.0.1:{life.listener.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, trust_env=False) as self.http:
                self.paused = asyncio.Event()
                self.stream = asyncio.create_task(self._read())
                await self.paused.wait()
                signal.raise_signal(signal.SIGTERM)
                await self.stop.came.wait()
                yield self

    async def _read(self) -> bytes:
        text = b""
        async with self.http.stream("POST", COMPLETIONS, json=BODY) as response:
            self.client.pause = PAUSE
            async for part in response.aiter_bytes():
                text += part
                if COMMENT in text:
                    self.paused.set()
        return text.replace(COMMENT, b"")

    async def draining(self) -> None:
        """Wait until the server drains."""
        while not self.app.state.service.draining:
            await asyncio.sleep(0)


async def test_sigterm_waits_for_requests_that_are_paused() -> None:
    async with Running.told_to_end() as running:
        await running.draining()
        for path, status in (("/live", 200), ("/health", 503)):
            assert (await running.http.get(path)).status_code == status
        refused = await running.http.post(COMPLETIONS, json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert not running.serving.done()
        running.client.serve()
        text = await running.stream
        assert text.count(b"data: ") == 4
        assert text.endswith(b"[DONE]\n\n")
        assert await running.serving == 0


async def test_engines_that_do_not_come_back_end_the_draining() -> None:
    async with Running.told_to_end() as running:
        await running.draining()
        running.client.die()
        assert b'"code":"engine_dead"' in await running.stream
        with pytest.raises(EngineDead, match=r"rank 0 was killed by SIGKILL\."):
            await running.serving


async def test_a_second_signal_ends_the_server_during_a_pause() -> None:
    async with Running.told_to_end() as running:
        signal.raise_signal(signal.SIGTERM)
        await running.second.wait()
        running.client.serve()
        await running.serving
        await running.stream


async def test_a_pause_that_outlasts_the_draining_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LAST_RESPONSES_S", 0)
    async with Running.told_to_end(drain_timeout_s=0.0) as running:
        while not running.client.aborted:
            await asyncio.sleep(0.01)
        with pytest.raises(httpx.RemoteProtocolError):
            await running.stream
        assert await running.serving == 0
