"""Bodies that are too large, too many outputs, or no JSON: refused early, and without harm to other requests."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from api_bodies import refused
from api_clients import CHAT, COMPLETIONS, JSON, app_of, call, complete, serving, tokenizer
from fake_engine import FakeEngine, FakeInfo
from pydantic import ValidationError

from serving.api import prompts
from serving.api.http import bodies
from serving.api.schema.lax_scalars import MAX_ITEMS
from serving.api.schema.request_models import ChatCompletionRequest, CompletionRequest
from serving.text.tokenizer import Vocabulary

LIMIT = 5000


def padded(size: int) -> bytes:
    """A completion's body of so many bytes."""
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": ""}).encode()
    return body[:-2] + b"u" * (size - len(body)) + body[-2:]


def test_a_body_up_to_the_limit_is_read() -> None:
    app = app_of(FakeEngine(), max_request_bytes=LIMIT)
    for size, status in ((LIMIT, 200), (LIMIT + 1, 413)):
        response = call(app, "POST", COMPLETIONS, content=padded(size), headers=JSON)
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

    response = call(app_of(FakeEngine(), max_request_bytes=LIMIT), "POST", path, content=chunks(), headers=JSON)
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
    assert call(app, "POST", COMPLETIONS, content=padded(2 * LIMIT), headers=JSON).status_code == 401


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
    assert len(complete(app, {"prompt": ["a", "b"], "n": 2, "max_tokens": 1})["choices"]) == 4


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
    response = call(app_of(engine), "POST", path, content=body, headers=JSON)
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
