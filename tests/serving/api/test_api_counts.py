"""How much there may be in a body: it is counted before it is parsed, and nothing holds the event loop for 50 ms."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import httpx
import pytest
from api_clients import CHAT, COMPLETIONS, JSON, app_of, call, client_of
from fake_engine import FakeEngine

from serving.api.http import bodies
from serving.api.schema.errors import ApiError

SIZE = 6_000_000
LIMIT_S = 0.05
PLACES = {
    "prompt": (COMPLETIONS, b'{"prompt":[%s]}'),
    "prompts": (COMPLETIONS, b'{"prompt":[[%s]]}'),
    "messages": (CHAT, b'{"messages":[%s]}'),
    "content": (CHAT, b'{"messages":[{"role":"user","content":[%s]}]}'),
    "kwargs": (CHAT, b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":[%s]}}'),
    "detokenize": ("/detokenize", b'{"tokens":[%s]}'),
}
ITEMS = [b"[]", b"[5]", b"1", b'"a"', b"1.5", b"null", b'{"role":"user"}', b"1" * 4000]


@pytest.fixture
def frozen() -> Iterator[None]:
    """As in a server: the collector does not walk through all modules."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def longest_hold(app: Any, path: str, body: bytes) -> tuple[float, httpx.Response]:
    """The longest time, of this thread's, for which the event loop had no turn while it answered; and the answer.

    The least of three attempts, if the first is over the limit: a processor that others share is slower at times.
    """
    held, response = held_once(app, path, body)
    for _ in range(2):
        if held >= LIMIT_S:
            held = min(held, held_once(app, path, body)[0])
    return held, response


def held_once(app: Any, path: str, body: bytes) -> tuple[float, httpx.Response]:

    async def run() -> tuple[float, httpx.Response]:
        longest = 0.0

        async def watch() -> None:
            nonlocal longest
            while True:
                begun = time.thread_time()
                await asyncio.sleep(0)
                longest = max(longest, time.thread_time() - begun)

        async with client_of(app) as client:
            request = client.build_request("POST", path, content=body, headers=JSON)
            watching = asyncio.create_task(watch())
            response = await client.send(request)
            watching.cancel()
        return longest, response

    return asyncio.run(run())


@pytest.mark.wide_sample(3)
@pytest.mark.long
@pytest.mark.sample(7)
@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item[:20].decode())
@pytest.mark.parametrize("place", PLACES)
def test_many_values_are_refused_before_they_are_parsed(place: str, item: bytes) -> None:
    path, around = PLACES[place]
    app = app_of(FakeEngine(), max_outputs_per_request=1024)
    body = around % b",".join([item] * (SIZE // (len(item) + 1)))
    longest, response = longest_hold(app, path, body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "body_too_complex")
    assert longest < LIMIT_S


@pytest.mark.long
@pytest.mark.sample(7)
@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("item", ITEMS[:-1], ids=bytes.decode)
@pytest.mark.parametrize("place", PLACES)
def test_as_many_as_are_allowed_do_not_hold_the_loop(place: str, item: bytes) -> None:
    path, around = PLACES[place]
    app = app_of(FakeEngine(), max_outputs_per_request=1024)
    parts = sum(item.count(sign) for sign in (b"[", b"{", b".", b"e")) + item.count(b'"') // 2
    count = (bodies.MAX_PARTS // parts if parts else bodies.MAX_VALUES) - 20
    longest, response = longest_hold(app, path, around % b",".join([item] * count))
    assert response.status_code == 200 or response.json()["error"]["code"] != "body_too_complex"
    assert longest < LIMIT_S


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        (b'{"prompt":"%s"}' % (b',[{:.e\\"' * 200_000), False),
        (b'{"prompt":"%s"}' % (b"\\\\" * 1_000_000), False),
        (b'{"prompt":"%s"}' % (b'\\\\\\"' * 500_000), False),
        (b'{"prompt":"a\\\\","x":[%s' % (b"[]," * 200_000), True),
        (b'{"prompt":"a\\\\\\"","x":[%s' % (b"[]," * 200_000), True),
        (b"\\" * 3_000_000, False),
        (b'"' * 3_000_000, True),
        (b'{"x": 0.%s}' % (b"1" * 101), True),
        (b'{"x": "%s"}' % (b"1" * 1000), False),
    ],
)
def test_what_is_in_a_text_does_not_count(body: bytes, refused: bool) -> None:
    with pytest.raises(ApiError, match="The body has more than") if refused else nullcontext():
        asyncio.run(bodies.check_counts(body))


def test_pieces_are_counted_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(5)
    for _ in range(300):
        texts = ["".join(chance.choices('a"\\,[{:', k=chance.randrange(9))) for _ in range(20)]
        body = json.dumps([chance.choice([text, {text: 1}, [[]], None]) for text in texts]).encode()
        expected = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", body)
        for size in (1, 2, 3, 7, len(body)):
            monkeypatch.setattr(bodies, "_PIECE", size)
            assert b"".join(bodies._outside_strings(body)).replace(b'"', b"") == expected


@pytest.mark.wide_sample(6)
@pytest.mark.parametrize("wrong", ["a", -1, True, 1.5, None, []])
@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (COMPLETIONS, {"prompt": [5] * 200_000}, "prompt.150000"),
        (COMPLETIONS, {"prompt": [[5], [5] * 200_000]}, "prompt.1.150000"),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [5] * 200_000}, "allowed_token_ids.150000"),
        ("/detokenize", {"tokens": [5] * 200_000}, "tokens.150000"),
    ],
)
def test_a_wrong_id_in_a_long_list_is_named(path: str, body: dict[str, Any], place: str, wrong: Any) -> None:
    name, *inner, index = place.split(".")
    ids = body[name][int(inner[0])] if inner else body[name]
    wrong_there = [*ids]
    wrong_there[int(index)] = wrong
    value = [body[name][0], wrong_there] if inner else wrong_there
    engine = FakeEngine()
    response = call(app_of(engine), "POST", path, content=json.dumps({**body, name: value}).encode(), headers=JSON)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, place)
    assert error["message"].startswith(f"{place}: Input should be a token id")
    assert not engine.requests


def test_long_lists_that_are_right_pass() -> None:
    engine = FakeEngine()
    app = app_of(engine)
    body = {
        "prompt": [5] * 200_000,
        "truncate_prompt_tokens": 4,
        "max_tokens": 1,
        "allowed_token_ids": [5, 6] * 100_000,
    }
    response = call(app, "POST", COMPLETIONS, content=json.dumps(body).encode(), headers=JSON)
    assert response.status_code == 200
    assert [list(request.token_ids) for request in engine.requests] == [[5] * 4]
    for count, status in ((2**17, 200), (2**17 + 1, 400)):
        body = {"tokens": [5] * count}
        response = call(app, "POST", "/detokenize", content=json.dumps(body).encode(), headers=JSON)
        assert response.status_code == status
    response = call(app, "POST", COMPLETIONS, content=b'{"prompt": [' + b"5," * 200_000 + b"]}", headers=JSON)
    assert "not valid JSON" in response.json()["error"]["message"]


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", COMPLETIONS, {"prompt": "a", "logit_bias": {LONG: "a"}}),
        ("POST", COMPLETIONS, {"prompt": "a", "model": LONG}),
        ("POST", COMPLETIONS, {"prompt": "a", "response_format": {LONG: LONG}}),
        ("POST", CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
        ("POST", COMPLETIONS, LONG),
        ("GET", f"/{LONG}", None),
        ("POST", f"/v1/models/{LONG}", None),
    ],
)
def test_what_a_client_wrote_is_cut_in_messages(method: str, path: str, body: Any) -> None:
    response = call(app_of(FakeEngine()), method, path, content=json.dumps(body).encode(), headers=JSON)
    assert response.status_code >= 400
    assert len(response.content) < 1000
