"""Work of large bodies: outside the event loop, dropped when nobody waits for it, ended by a drain."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
from api_bodies import Exchange
from api_clients import app_of, client_of
from fake_engine import FakeEngine

from serving.api import service
from serving.api.schema.errors import ApiError
from serving.api.service import SHORT_BYTES, THREADS, LongWork
from serving.requests import QueueFull


class Gate:
    """Work that begins, and waits to be let through."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun = 0

    def __call__(self, *args: Any, **kwargs: Any) -> list[int]:
        """One piece of work."""
        self.begun += 1
        assert self.open.wait(60)
        return [5]


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def test_short_work_is_done_at_once_and_long_work_in_a_thread() -> None:
    async def run() -> None:
        work = LongWork(lambda: False)
        here = threading.current_thread()
        assert await work.run(threading.current_thread, SHORT_BYTES - 1) is here
        assert await work.run(threading.current_thread, SHORT_BYTES) is not here
        with pytest.raises(ZeroDivisionError):
            await work.run(lambda: 1 // 0, SHORT_BYTES)
        await until(lambda: not any(thread.name == "long work" for thread in threading.enumerate()))

    asyncio.run(run())


def test_bodies_of_many_pieces_take_turns_with_others() -> None:
    async def run() -> None:
        work = LongWork(lambda: False)
        gates = [Gate() for _ in range(THREADS)]
        done: list[str] = []

        def piece(name: str) -> str:
            done.append(name)
            return name

        first = [asyncio.create_task(work.run(gate, SHORT_BYTES)) for gate in gates]
        await until(lambda: all(gate.begun for gate in gates))
        many = asyncio.create_task(work.run_pieces([partial(piece, f"many {n}") for n in range(50)], SHORT_BYTES))
        await asyncio.sleep(0)
        other = asyncio.create_task(work.run(partial(piece, "other"), SHORT_BYTES))
        await asyncio.sleep(0)
        gates[0].open.set()  # one thread for both
        assert await other == "other"
        assert await many == [f"many {n}" for n in range(50)]
        assert done[:3] == ["many 0", "other", "many 1"]
        with pytest.raises(ZeroDivisionError):
            await work.run_pieces([partial(piece, "x"), lambda: 1 // 0, partial(piece, "never")], SHORT_BYTES)
        assert done[-1] == "x"
        gates[1].open.set()
        await asyncio.gather(*first)

    asyncio.run(run())


def test_work_that_nobody_waits_for_is_dropped(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "WAITING_BYTES", 3 * SHORT_BYTES)

    async def run() -> None:
        work = LongWork(lambda: False)
        begun = [asyncio.create_task(work.run(gate, SHORT_BYTES)) for _ in range(THREADS)]
        await until(lambda: gate.begun == THREADS)
        waiting = [asyncio.create_task(work.run(gate, SHORT_BYTES)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await work.run(gate, SHORT_BYTES)
        for task in waiting[:2]:
            task.cancel()
        await asyncio.gather(*waiting[:2], return_exceptions=True)
        later = asyncio.create_task(work.run(gate, SHORT_BYTES))
        await asyncio.sleep(0)
        gate.open.set()
        assert await asyncio.gather(*begun, waiting[2], later) == [[5]] * (THREADS + 2)
        assert gate.begun == THREADS + 2

    asyncio.run(run())


def test_of_work_that_was_put_back_only_what_is_left_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "WAITING_BYTES", 11 * SHORT_BYTES)
    monkeypatch.setattr(service, "THREADS", 1)

    async def run() -> None:
        work = LongWork(lambda: False)
        piece, between, after = Gate(), Gate(), Gate()
        many = asyncio.create_task(work.run_pieces([piece, after], 10 * SHORT_BYTES))
        await until(lambda: piece.begun)
        other = asyncio.create_task(work.run(between, SHORT_BYTES))
        await asyncio.sleep(0)
        piece.open.set()
        await until(lambda: between.begun)  # now half of the large one waits
        more = asyncio.create_task(work.run(after, 6 * SHORT_BYTES))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await work.run(after, SHORT_BYTES)
        between.open.set()
        after.open.set()
        assert len(await many) == 2
        await asyncio.gather(other, more)

    asyncio.run(run())


def test_draining_ends_what_runs_and_what_waits(gate: Gate) -> None:
    draining = False

    async def run() -> None:
        nonlocal draining
        work = LongWork(lambda: draining)
        tasks = [asyncio.create_task(work.run(gate, SHORT_BYTES)) for _ in range(2 * THREADS)]
        await until(lambda: gate.begun == THREADS)
        draining = True
        async with asyncio.timeout(5):
            errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(error, ApiError) and error.code for error in errors] == ["shutting_down"] * len(tasks)
        gate.open.set()
        await until(lambda: not any(thread.name == "long work" for thread in threading.enumerate()))
        assert gate.begun == THREADS

    asyncio.run(run())


TEXT = "a" * SHORT_BYTES
PATHS: Mapping[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT},
    "/tokenize": {"prompt": TEXT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/responses": {"input": TEXT},
}


@pytest.mark.parametrize("path", PATHS)
def test_the_server_answers_and_drains_while_a_prompt_is_tokenized(
    path: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_of(FakeEngine())
    monkeypatch.setattr(type(app.state.service.tokenizer), "encode", gate)

    async def run() -> None:
        async with client_of(app) as client, asyncio.timeout(30):
            answer = asyncio.create_task(client.post(path, json=PATHS[path]))
            await until(lambda: gate.begun)
            assert (await client.get("/health")).status_code == 200
            app.state.service.draining = True
            response = await answer
        assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
        assert "retry-after" in response.headers

    asyncio.run(run())


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_leaves_ends_the_wait(path: str, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    app = app_of(engine)
    monkeypatch.setattr(type(app.state.service.tokenizer), "encode", gate)

    async def run() -> None:
        exchange = Exchange(app, path, PATHS[path])
        await until(lambda: gate.begun)
        async with asyncio.timeout(5):
            await exchange.leave()
        assert not engine.requests

    asyncio.run(run())
