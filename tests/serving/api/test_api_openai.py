"""The openai client against a real server: its types, its errors, its streams; and clients that leave.

It is imported by the tests: a second that only the worker which runs them needs.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from api_clients import MODEL, Recorder, app_of, says, serving
from fake_engine import FakeEngine
from pydantic import BaseModel

from model_runner import RequestError
from serving.requests import EngineDead

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletionChunk

pytestmark = pytest.mark.server

KEY = "secret"
TEXT = "Zoë says 🎉 in 漢字."
SECONDS_TO_NOTICE = 30.0


class Server:
    """An engine that tests change, what was counted, and where its server listens."""

    def __init__(self, engine: FakeEngine, recorder: Recorder, address: str) -> None:
        self.engine, self.recorder, self.address = engine, recorder, address


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    engine, recorder = FakeEngine(), Recorder()
    with serving(app_of(engine, api_key=KEY, observer=recorder)) as address:
        yield Server(engine, recorder, address)


@pytest.fixture
def server(running: Server) -> Server:
    """Engine and counts are as new for every test."""
    vars(running.recorder).update(vars(Recorder()))
    vars(running.engine).update(vars(FakeEngine(reply=says(TEXT))))
    return running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as made:
        yield made


BESIDES = {
    *("stop_reason", "matched_stop", "token_ids", "prompt_token_ids", "prompt_logprobs", "prompt_text"),
    *("routed_experts", "reasoning", "reasoning_content", "service_tier"),
    *("kv_transfer_params", "ec_transfer_params", "metrics"),
}
"""Fields of vLLM and SGLang that the client's types do not have."""


def strict(answer: BaseModel) -> None:
    """The answer is of the client's own type, with no other field that the type does not have."""
    type(answer).model_validate_json(answer.model_dump_json(exclude_unset=True), strict=True)

    def check(value: Any) -> None:
        if isinstance(value, BaseModel):
            assert set(value.model_extra or {}) <= BESIDES
            for name in value.model_fields_set:
                check(getattr(value, name))
        elif isinstance(value, list):
            for item in value:
                check(item)

    check(answer)


MESSAGES: Any = [{"role": "user", "content": "Hello"}]


def test_completions(client: openai.OpenAI) -> None:
    from openai.types import Completion

    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=50, logprobs=2, n=2)
    assert isinstance(answer, Completion)
    strict(answer)
    assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    with client.completions.create(model=MODEL, prompt="Hello", max_tokens=50, stream=True) as events:
        assert "".join(event.choices[0].text for event in events) == TEXT


def test_chat(client: openai.OpenAI) -> None:
    from openai.types.chat import ChatCompletion

    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert isinstance(answer, ChatCompletion)
    strict(answer)
    assert answer.choices[0].message.content == TEXT
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert bytes(byte for token in logprobs.content[:-1] for byte in token.bytes or []).decode() == TEXT


def test_chat_streamed(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    with client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options=options, logprobs=True, top_logprobs=1
    ) as events:
        chunks: list[ChatCompletionChunk] = list(events)
    for chunk in chunks:
        strict(chunk)
        assert chunk.usage is not None
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []


def test_the_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, logprobs=True) as helper:
        text = "".join(event.delta for event in helper if event.type == "content.delta")
        final = helper.get_final_completion()
    assert text == TEXT == final.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_the_asynchronous_client(server: Server) -> None:
    import openai

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as client:
            whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
            assert whole.choices[0].message.content == TEXT
            async with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as helper:
                assert (await helper.get_final_completion()).choices[0].message.content == TEXT
            async with await client.completions.create(model=MODEL, prompt="a", stream=True, max_tokens=50) as events:
                assert "".join([event.choices[0].text async for event in events]) == TEXT
            assert [card.id async for card in client.models.list()] == [MODEL]
            assert (await client.models.retrieve(MODEL)).id == MODEL

    asyncio.run(run())


def test_errors_have_types(server: Server, client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="temperature") as wrong:
        client.completions.create(model=MODEL, prompt="a", temperature=3)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * 2000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    server.engine.fail_after, server.engine.failure = 0, RequestError("no room")
    with pytest.raises(openai.BadRequestError, match="no room"):
        client.completions.create(model=MODEL, prompt="a", stream=True)
    server.engine.fail_after, server.engine.failure = 4, EngineDead("rank 1: killed")
    with pytest.raises(openai.InternalServerError, match="rank 1"):
        client.completions.create(model=MODEL, prompt="a", max_tokens=50)
    with client.completions.create(model=MODEL, prompt="a", max_tokens=50, stream=True) as events:
        assert next(events).choices[0].text
        with pytest.raises(openai.APIError, match="rank 1"):
            list(events)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_TO_NOTICE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def leaving(server: Server) -> Iterator[httpx.Client]:
    """A client of an engine that stops in mid-answer."""
    headers = {"Authorization": f"Bearer {KEY}"}
    server.engine.hold = asyncio.Event()
    with httpx.Client(base_url=server.address, headers=headers, timeout=SECONDS_TO_NOTICE) as client:
        yield client


def expect_aborts(server: Server, n: int) -> None:
    """`n` requests, all of which end by themselves."""
    wait_until(lambda: len(server.recorder.reasons) == len(server.engine.aborted) == n and not server.engine.alive)
    assert server.recorder.reasons == ["abort"] * n


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_stream(server: Server, leaving: httpx.Client, n: int) -> None:
    server.engine.hold_after = 3
    body = {"prompt": "a", "max_tokens": 50, "n": n, "stream": True}
    with leaving.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # the connection is closed with it
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
        wait_until(lambda: len(server.engine.alive) == n)
    expect_aborts(server, n)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_before_anything(server: Server, leaving: httpx.Client, stream: bool, n: int) -> None:
    request = leaving.build_request(
        "POST", "/v1/chat/completions", json={"messages": MESSAGES, "n": n, "stream": stream}
    )
    connection = http.client.HTTPConnection(request.url.host, request.url.port)
    connection.request(request.method, request.url.path, request.content, dict(request.headers))
    wait_until(lambda: len(server.engine.alive) == n)
    connection.close()
    expect_aborts(server, n)
