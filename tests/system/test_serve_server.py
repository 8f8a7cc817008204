"""Draining, without engines: what it waits for, and what ends the waiting."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from repository import TINY_MOE

from serving import server
from serving.options import Command, resolve_settings, to_engine_options
from serving.options.sources import read_keywords
from serving.requests import EngineDead
from serving.server import _Serve, _Stop, _unless
from serving.text.tokenizer import load_tokenizer
from ubatch import ConfigError


@contextmanager
def serve_of(**keywords: Any) -> Iterator[_Serve]:
    """A server that has a socket, and has started nothing."""
    settings = resolve_settings(read_keywords({"model": TINY_MOE, **keywords}), gpus=0)
    with socket.socket() as listener:
        yield _Serve(Command(settings, to_engine_options(settings), False, ()), listener, 1024)


def finish(client: Any, died: asyncio.Future[Any]) -> None:
    client.num_outstanding = 0


def die(client: Any, died: asyncio.Future[Any]) -> None:
    died.set_result(EngineDead("rank 0 was killed."))


def nothing(client: Any, died: asyncio.Future[Any]) -> None:
    pass


@pytest.mark.parametrize(
    ("happens", "drain_timeout_s", "left"),
    [(finish, 600.0, 0), (die, 600.0, 1), (nothing, 0.1, 1)],
)
async def test_draining_ends(
    happens: Callable[[Any, asyncio.Future[Any]], None], drain_timeout_s: float, left: int, signals_back: None
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
