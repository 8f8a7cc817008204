"""A server that is told to end while its engines are started again: over HTTP, without engines."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from api_clients import COMPLETIONS, app_of
from fake_engine import FakeEngine
from repository import TINY_MOE

from serving import server
from serving.api.sse import COMMENT
from serving.engine.restarts import Pause
from serving.options import Command, resolve_settings, to_engine_options
from serving.options.sources import read_keywords
from serving.requests import EngineDead
from serving.server import _Serve, _Stop

pytestmark = pytest.mark.usefixtures("signals_back")

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
        own, self = resolve_settings(read_keywords({"model": TINY_MOE, **settings}), gpus=0), cls()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            life = _Serve(Command(own, to_engine_options(own), False, ()), listener, 1024)
            client: Any = self.client
            self.serving = asyncio.create_task(life._serve(client, self.app, self.stop))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
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
