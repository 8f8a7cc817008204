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
from repository import TINY_MOE

from model_runner import RequestError
from serving.requests import EngineDead
from serving.text.tokenizer import load_tokenizer
from serving.turns.parsers import TurnSettings

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
    app = app_of(engine, api_key=KEY, observer=recorder, turns=TurnSettings(True, "hermes"))
    own = app.state.service.tokenizer = load_tokenizer(TINY_MOE)
    own.chat_template = "{{ tools or '' }}" + own.chat_template
    with serving(app) as address:
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
    *("routed_experts", "reasoning", "reasoning_content", "service_tier", "store"),
    *("kv_transfer_params", "ec_transfer_params", "metrics"),
}
"""Fields of vLLM and SGLang, and newer ones of OpenAI, that the client's types do not have."""


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


def test_responses(client: openai.OpenAI) -> None:
    from openai.types.responses import Response

    answer = client.responses.create(
        model=MODEL, input="Hello", include=["message.output_text.logprobs"], top_logprobs=2, metadata={"a": "b"}
    )
    assert isinstance(answer, Response)
    strict(answer)
    assert (answer.output_text, answer.status) == (TEXT, "completed")
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 0
    again = client.responses.create(
        model=MODEL, input=[*answer.output, {"role": "user", "content": "More"}], store=False, max_output_tokens=2
    )
    assert (again.status, again.incomplete_details and again.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )


def test_responses_streamed(client: openai.OpenAI) -> None:
    with client.responses.create(model=MODEL, input="Hello", stream=True) as events:
        seen = list(events)
    for event in seen:
        strict(event)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.completed"
    with client.responses.stream(model=MODEL, input="Hello") as helper:
        text = "".join(event.delta for event in helper if event.type == "response.output_text.delta")
        final = helper.get_final_response()
    assert text == TEXT == final.output_text


def test_responses_that_follow_a_pydantic_model(server: Server, client: openai.OpenAI) -> None:
    class City(BaseModel):
        name: str
        people: int

    server.engine.reply = says('{"name": "Bonn", "people": 330000}')
    bonn = City(name="Bonn", people=330_000)
    parsed = client.responses.parse(model=MODEL, input="A city?", text_format=City)
    assert parsed.output_parsed == bonn
    with client.responses.stream(model=MODEL, input="A city?", text_format=City) as helper:
        (done,) = [event for event in helper if event.type == "response.output_text.done"]
        assert done.parsed == helper.get_final_response().output_parsed == bonn
    client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City)
    assert len({request.params.grammar for request in server.engine.requests}) == 1
    assert server.engine.requests[0].params.grammar is not None


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def test_an_agent_of_responses(server: Server, client: openai.OpenAI) -> None:
    """A tool with a pydantic model is called, and its result sent back, by the client's own helpers."""
    import openai

    class Add(BaseModel):
        a: int
        b: int

    tool: Any = openai.pydantic_function_tool(Add, name="add")
    flat = {"type": "function", **tool["function"]}
    server.engine.reply = says(CALL)
    asked: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    parsed = client.responses.parse(model=MODEL, input=asked, tools=[flat])
    (call,) = parsed.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": 2})
    with client.responses.stream(model=MODEL, input=asked, tools=[flat]) as helper:
        (*_, last) = [event for event in helper if event.type == "response.function_call_arguments.delta"]
        assert json.loads(last.snapshot) == {"a": 1, "b": 2}
        (again,) = helper.get_final_response().output
    assert again.type == "function_call"
    server.engine.reply = says("3")
    asked += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
    assert client.responses.create(model=MODEL, input=asked, tools=[flat]).output_text == "3"


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
    with pytest.raises(openai.BadRequestError) as stored:
        client.responses.create(model=MODEL, input="a", previous_response_id="resp_1")
    assert stored.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError, match="nothing is stored"):
        client.responses.retrieve("resp_1")
    with client.responses.create(model=MODEL, input="a", stream=True) as failing:
        (*_, error, failed) = failing
    assert (error.type, failed.type) == ("error", "response.failed")


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


@pytest.mark.parametrize(
    ("path", "body", "n", "begins"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 50}, 1, 'data: {"id":"cmpl-'),
        ("/v1/completions", {"prompt": "a", "max_tokens": 50, "n": 3}, 3, 'data: {"id":"cmpl-'),
        ("/v1/responses", {"input": "a"}, 1, "event: response.created"),
    ],
)
def test_a_client_that_leaves_a_stream(
    server: Server, leaving: httpx.Client, path: str, body: dict[str, Any], n: int, begins: str
) -> None:
    server.engine.hold_after = 3
    with leaving.stream("POST", path, json={**body, "stream": True}) as response:
        lines = response.iter_lines()  # the connection is closed with it
        assert next(lines).startswith(begins)
        wait_until(lambda: len(server.engine.alive) == n)
    expect_aborts(server, n)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "n"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, 1),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 3}, 3),
        ("/v1/responses", {"input": "a"}, 1),
    ],
)
def test_a_client_that_leaves_before_anything(
    server: Server, leaving: httpx.Client, path: str, body: dict[str, Any], n: int, stream: bool
) -> None:
    request = leaving.build_request("POST", path, json={**body, "stream": stream})
    connection = http.client.HTTPConnection(request.url.host, request.url.port)
    connection.request(request.method, request.url.path, request.content, dict(request.headers))
    wait_until(lambda: len(server.engine.alive) == n)
    connection.close()
    expect_aborts(server, n)
