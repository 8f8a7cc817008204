"""Bodies that are too large, too many outputs, or no JSON: refused early; work of large bodies is done in threads."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from api_clients import CHAT, COMPLETIONS, Exchange, app_of, client_of, post, post_bytes, refused, serving, tokenizer
from fake_engine import FakeEngine, FakeInfo
from pydantic import ValidationError

from serving.api import prompts, service
from serving.api.http import bodies
from serving.api.schema.errors import ApiError
from serving.api.schema.lax_scalars import MAX_ITEMS
from serving.api.schema.request_models import ChatCompletionRequest, CompletionRequest
from serving.api.service import SHORT_BYTES, THREADS, LongWork
from serving.requests import QueueFull
from serving.text.tokenizer import Vocabulary

LIMIT = 5000


def padded(size: int) -> bytes:
    """A completion's body of so many bytes."""
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": ""}).encode()
    return body[:-2] + b"u" * (size - len(body)) + body[-2:]


def test_a_body_up_to_the_limit_is_read() -> None:
    app = app_of(FakeEngine(), max_request_bytes=LIMIT)
    for size, status in ((LIMIT, 200), (LIMIT + 1, 413)):
        response = post_bytes(app, COMPLETIONS, padded(size))
        assert response.status_code == status
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("request_too_large", "invalid_request_error")
    assert "--max-request-bytes" in error["message"]
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_a_body_of_unknown_length_may_be_without_end(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows is thrown away for a moment, so that a client that still sends gets its answer."""
    monkeypatch.setattr(bodies, "_DISCARD_S", 0.2)

    async def chunks() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 1000
            await asyncio.sleep(0)

    response = post_bytes(app_of(FakeEngine(), max_request_bytes=LIMIT), path, chunks())
    assert response.status_code == 413


@contextmanager
def posting(length: str) -> Iterator[socket.socket]:
    """A connection to a server, after the head of a completion with this header."""
    with serving(app_of(FakeEngine(), max_request_bytes=LIMIT)) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\n{length}\r\n".encode())
            connection.sendall(b"Content-Type: application/json\r\n\r\n")
            yield connection


def test_a_client_that_reads_when_all_is_sent_gets_the_answer() -> None:
    with posting("Content-Length: 20000000") as connection:
        connection.sendall(b" " * 20_000_000)
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("length", ["Content-Length: 100000000", "Transfer-Encoding: chunked"])
def test_the_connection_is_closed_at_the_limit(length: str) -> None:
    """Over a network: the answer comes though the client has sent no more than what passes the limit."""
    with posting(length) as connection:
        if "chunked" in length:
            connection.sendall(b"1771\r\n" + b" " * 6001 + b"\r\n")
        answer = b""
        while received := connection.recv(65536):
            answer += received
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"


def test_the_key_comes_before_the_body() -> None:
    app = app_of(FakeEngine(), max_request_bytes=LIMIT, api_key="k")
    assert post_bytes(app, COMPLETIONS, padded(2 * LIMIT)).status_code == 401


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a"] * 5}, "prompt"),
        ({"prompt": [[5]] * 5}, "prompt"),
        ({"prompt": ["a"] * 2, "n": 3}, "n"),
        ({"prompt": "a", "n": 5}, "n"),
        ({"messages": [{"role": "user", "content": "a"}], "n": 5}, "n"),
    ],
)
def test_outputs_of_a_body_are_limited(body: dict[str, Any], param: str) -> None:
    app = app_of(FakeEngine(), max_outputs_per_request=4)
    error = refused(app, CHAT if "messages" in body else COMPLETIONS, body)
    assert error["param"] == param
    assert "at most 4" in error["message"]
    assert len(post(app, COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "max_tokens": 1}).json()["choices"]) == 4


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_text_that_cannot_fit_is_not_tokenized(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a" * (FakeInfo().max_model_len * Vocabulary.of(tokenizer()).longest + 1)
    monkeypatch.delattr(prompts, "encode")
    param, value = ("prompt", text) if path == COMPLETIONS else ("messages", [{"role": "user", "content": text}])
    error = refused(FakeEngine(), path, {param: value})
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_the_longest_token_bounds_the_text() -> None:
    vocabulary = Vocabulary.of(tokenizer())
    assert max(len(vocabulary.decode([token])) for token in range(len(tokenizer()))) <= vocabulary.longest


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, b'{"prompt": "a\\ud800"}'),
        (COMPLETIONS, b'{"prompt": ["\\udc00b"], "echo": true}'),
        (COMPLETIONS, b'{"prompt": "\xed\xa0\x80"}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud83d!"}]}'),
        ("/tokenize", b'{"prompt": "\\ud800"}'),
        (COMPLETIONS, b'{"prompt": "a", "logit_bias": {"' + b"1" * 5000 + b'": 1}}'),
        (COMPLETIONS, b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}"),
        (COMPLETIONS, b'{"prompt": [' + b"1" * 4000 + b"]}"),
        *[
            (
                CHAT,
                b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": '
                + deep(levels)
                + b"}}",
            )
            for levels in (900, 100_000)
        ],
        (CHAT, b'{"messages": [{"role": "user", "content": "a", "x": ' + deep(900) + b"}]}"),
        (COMPLETIONS, b'{"prompt": "a", "temperature": ' + deep(900) + b"}"),
    ],
)
def test_what_no_text_or_number_is_made_of_is_400(path: str, body: bytes) -> None:
    engine = FakeEngine()
    response = post_bytes(app_of(engine), path, body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(response.content) < 1000
    assert not engine.requests


def test_a_wrong_list_is_refused_at_its_first_item() -> None:
    """Not with an error per item, of which there may be millions."""
    for wrong in ({"stop_token_ids": ["a"] * 9}, {"prompt": [[-1]] * 9}, {"prompt": ["a", *[5] * 9]}):
        with pytest.raises(ValidationError) as caught:
            CompletionRequest.model_validate({"prompt": "a", **wrong})
        assert caught.value.error_count() == 1
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": [[]] * 9}]})
    assert caught.value.error_count() == 1


def test_strings_among_numbers_are_read() -> None:
    body = {"prompt": "a", "stop_token_ids": ["5", 6], "logit_bias": {"5": "-1.5", "6": 2}}
    read = CompletionRequest.model_validate(body)
    assert (read.stop_token_ids, read.logit_bias) == ([5, 6], {"5": -1.5, "6": 2.0})
    assert CompletionRequest.model_validate({"prompt": ["5"]}).prompt == ["5"]
    assert [CompletionRequest.model_validate({"prompt": "a", "echo": echo}).echo for echo in (0, 1)] == [False, True]


def test_long_lists_are_not_looked_at_again() -> None:
    """Those that may take long; token ids were checked in pieces before."""
    ids = bodies.CheckedIds([5] * 3)
    assert CompletionRequest.model_validate({"prompt": "a", "allowed_token_ids": ids}).allowed_token_ids is ids
    with pytest.raises(ValidationError, match=r"stop_token_ids\.0"):
        CompletionRequest.model_validate({"prompt": "a", "stop_token_ids": ["5"] * (MAX_ITEMS + 1)})


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
