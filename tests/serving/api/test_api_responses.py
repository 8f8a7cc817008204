"""`/v1/responses`: what is answered, whole and streamed, and what is refused by field."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from api_clients import MODEL, RESPONSES, Recorder, app_of, app_with, call, post, refused, says, tokenizer
from fake_engine import FakeEngine, FakeInfo

from serving.api.schema.response_models import ErrorDetail
from serving.api.schema.responses_models import ModelResponse, ResponseEvent
from serving.requests import EngineDead
from serving.turns.parsers import TurnSettings

LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def respond(app: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """A response that must be given."""
    response = post(app, RESPONSES, {"model": MODEL, "input": "Hello", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events_of(app: Any, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, which must have names, and numbers in order, and no `[DONE]`."""
    response = post(app, RESPONSES, {"model": MODEL, "input": "Hello", "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *parts, end = response.text.split("\n\n")
    assert end == ""
    events = []
    for number, part in enumerate(parts):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        events.append(event)
    return events


def alike(response: Mapping[str, Any]) -> dict[str, Any]:
    """A response without what differs between two of them."""
    differing = {"id", "created_at", "completed_at", "output"}
    items = [{name: value for name, value in item.items() if name != "id"} for item in response["output"]]
    return {**{name: value for name, value in response.items() if name not in differing}, "output": items}


@pytest.mark.parametrize("more", [{}, LOGPROBS, {"max_output_tokens": 3}, {"reasoning": {"effort": "low"}, **LOGPROBS}])
def test_a_stream_ends_with_what_is_answered_whole(more: dict[str, Any]) -> None:
    body = {"instructions": "Be nice", "metadata": {"a": "b"}, **more}
    whole = respond(FakeEngine(reply=says("Zoë says 漢字")), body)
    events = events_of(FakeEngine(reply=says("Zoë says 漢字")), body)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert alike(events[-1]["response"]) == alike(whole)
    assert {event["response"]["id"] for event in events if "response" in event} == {events[0]["response"]["id"]}
    ModelResponse.model_validate(whole, strict=True)
    for event in events:
        known = ResponseEvent.model_validate(event, strict=True)
        assert known.model_dump(exclude_unset=True) == event


def test_what_the_response_says() -> None:
    prompt = "<system>Be nice<user>Hello<assistant>"
    engine = FakeEngine(reply=says("Hi"), num_cached_tokens=3)
    answer = respond(
        app_with(TEMPLATE, engine), {"instructions": "Be nice", "temperature": 0.5, "max_output_tokens": 9}
    )
    assert tokenizer().decode(engine.requests[0].token_ids) == prompt
    (message,) = answer["output"]
    assert message["content"] == [{"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}]
    assert (answer["status"], answer["incomplete_details"], answer["error"]) == ("completed", None, None)
    assert (answer["temperature"], answer["top_p"], answer["max_output_tokens"]) == (0.5, 1.0, 9)
    assert answer["usage"] == {
        "input_tokens": len(tokenizer().encode(prompt)),
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": len(tokenizer().encode("Hi")) + 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(tokenizer().encode(prompt)) + len(tokenizer().encode("Hi")) + 1,
    }
    assert answer["id"].startswith("resp_")
    assert engine.requests[0].group == answer["id"]


def test_a_response_that_is_cut() -> None:
    answer = respond(FakeEngine(reply=says("Hello there")), {"max_output_tokens": 2})
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert "completed_at" not in answer


def test_a_response_without_a_text() -> None:
    (message,) = respond(FakeEngine(reply=says("")), {})["output"]
    assert message["content"][0]["text"] == ""


def test_logprobs() -> None:
    answer = respond(FakeEngine(reply=says("Hi")), LOGPROBS)
    logprobs = answer["output"][0]["content"][0]["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in logprobs] == [2] * answer["usage"]["output_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_too_many_logprobs(stream: bool) -> None:
    """A stream's last events repeat all of them, so that they count as in a whole answer."""
    body = {"input": "a", "stream": stream, **LOGPROBS, "max_output_tokens": 400_000}
    error = refused(FakeEngine(info=FakeInfo(max_model_len=500_000)), RESPONSES, body)
    assert error["param"] == "top_logprobs"
    assert "at most 1000000 are returned" in error["message"]
    assert "set max_output_tokens lower" in error["message"]


def test_an_agents_second_turn_is_the_chats_prompt() -> None:
    """What items say, and what messages say, becomes the same prompt."""
    arguments = '{"city": "Bonn"}'
    items = [
        {"role": "user", "content": "Weather?"},
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c1",
            "name": "get",
            "arguments": arguments,
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "Rain"},
    ]
    calls = [{"id": "c1", "type": "function", "function": {"name": "get", "arguments": arguments}}]
    messages = [
        {"role": "system", "content": "Be nice"},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain"},
    ]
    engine = FakeEngine(reply=says("It rains."))
    app = app_with(TEMPLATE, engine)
    respond(app, {"instructions": "Be nice", "input": items})
    assert post(app, "/v1/chat/completions", {"messages": messages}).status_code == 200
    ours, chats = ([*request.token_ids] for request in engine.requests)
    assert ours == chats
    assert '[get {"city": "Bonn"}]<tool>Rain' in tokenizer().decode(ours)


TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "description": "adds", "strict": True}
CALLED = '<think>\nSo</think>\n\nWell.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
REQUIRED = '[{"name": "add", "parameters": {"a": 1}}]'
JSON_SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}


def calling(text: str = CALLED) -> Any:
    """An application whose model calls a tool, by a template that shows tools."""
    app = app_with("{{ tools }}" + TEMPLATE, FakeEngine(reply=says(text)))
    app.state.service.turns = TurnSettings(True, "hermes", "qwen3")
    return app


def test_reasoning_text_and_a_call() -> None:
    body = {"tools": [TOOL]}
    whole = respond(calling(), body)
    reasoning, message, call = whole["output"]
    assert [part["text"].strip() for part in reasoning["content"]] == ["So"]
    assert message["content"][0]["text"].strip() == "Well."
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 1})
    assert whole["status"] == "completed"
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    ModelResponse.model_validate(whole, strict=True)
    events = events_of(calling(), body)
    for event in events:
        assert ResponseEvent.model_validate(event, strict=True).model_dump(exclude_unset=True) == event
    streamed = events[-1]["response"]
    for item in (*streamed["output"], *whole["output"]):
        item.pop("call_id", None)
    assert alike(streamed) == alike(whole)
    assert "".join(event.get("delta", "") for event in events if "arguments" in event["type"]) == call["arguments"]


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("required", REQUIRED),
        ({"type": "function", "name": "add"}, '{"a": 1}'),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}, REQUIRED),
    ],
)
def test_a_call_that_is_forced(choice: Any, said: str) -> None:
    app = calling(said)
    body = {"tools": [TOOL], "tool_choice": choice}
    (call,) = respond(app, body)["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "add", {"a": 1})
    assert app.state.service.engine.requests[0].params.grammar is not None
    *_, last = events_of(calling(said), body)
    assert last["response"]["output"][0]["arguments"] == call["arguments"]


@pytest.mark.parametrize(
    ("given", "param", "reason"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "is missing"),
        (
            {"text": {"format": JSON_SCHEMA | {"schema": {"type": "nothing"}}}},
            "text.format.schema",
            "text.format.schema",
        ),
        (
            {"text": {"format": JSON_SCHEMA}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "text.format and",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "structured_outputs.regex"),
    ],
)
def test_a_form_that_cannot_be_enforced(given: dict[str, Any], param: str, reason: str) -> None:
    error = refused(FakeEngine(), RESPONSES, {"input": "a", **given})
    assert error["param"] == param
    assert reason in error["message"]


def test_a_call_that_is_cut_is_incomplete() -> None:
    body = {"tools": [TOOL], "max_output_tokens": len(tokenizer().encode(CALLED)) - 12}
    (*_, last) = events_of(calling(), body)
    assert last["type"] == "response.incomplete"
    assert [item["status"] for item in last["response"]["output"]][-1] == "incomplete"


def test_the_tools_of_a_response_are_the_chats() -> None:
    """The prompt is the same; only allowed tools are in it."""
    chats = {"type": "function", "function": {name: value for name, value in TOOL.items() if name != "type"}}
    app = calling()
    assert post(app, "/v1/chat/completions", {"messages": [MESSAGE], "tools": [chats]}).status_code == 200
    other = {"type": "function", "name": "other"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    answer = respond(app, {"input": "a", "tools": [other, TOOL], "tool_choice": allowed})
    first, second = (tokenizer().decode(request.token_ids) for request in app.state.service.engine.requests)
    assert first == second
    assert (answer["tool_choice"], answer["tools"]) == (allowed, [other, TOOL])


MESSAGE = {"role": "user", "content": "a"}
CALL_C = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "input": ({"input": None}, "text or a list of items"),
    "input.0": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "nothing is stored; send the item itself"),
    "input.1": ({"input": [MESSAGE, {"type": "web_search_call"}]}, "only messages, function calls"),
    "input.0.role": ({"input": [{"role": "tool", "content": "a"}]}, "'user', 'assistant', 'system' or 'developer'"),
    "input.0.content.0": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "'input_image' are not supported: only text is read",
    ),
    "input.1.output.0": (
        {"input": [MESSAGE, {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}]},
        "'input_file' are not supported: only text is read",
    ),
    "input.0.encrypted_content": (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]},
        "cannot be read here",
    ),
    "input.1.arguments": (
        {"input": [MESSAGE, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1"}]},
        "must be a JSON object",
    ),
    "input.1.call_id": (
        {"input": [MESSAGE, {"type": "function_call_output", "call_id": "c", "output": "5"}, CALL_C]},
        "No tool call found for function call output with call_id 'c'",
    ),
    "tools.0": ({"tools": [{"type": "web_search"}]}, "'web_search' are not supported: only functions are"),
    "tool_choice": ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "a function {'type': 'function'"),
    "tools.0.name": ({"tools": [{"type": "function", "name": "two words"}]}, "should match pattern"),
    "tools": ({"tools": [TOOL, TOOL]}, "2 tools have the name"),
    "tools.0.parameters": ({"tools": [{**TOOL, "parameters": {"type": "string"}}]}, "tools.0.parameters: its type"),
    "text.format": ({"text": {"format": {"type": "grammar"}}}, "use json_schema"),
    "text.verbosity": ({"text": {"verbosity": "low"}}, "in the instructions"),
    "reasoning.summary": ({"reasoning": {"summary": "concise"}}, "reasoning is not summarised"),
    "include.0": ({"include": ["everything"]}, "message.output_text.logprobs"),
    "top_logprobs": ({"top_logprobs": 2}, "needs include"),
    "previous_response_id": ({"previous_response_id": "resp_1"}, "nothing is stored; send the earlier items as input"),
    "conversation": ({"conversation": "conv_1"}, "nothing is stored"),
    "background": ({"background": True}, "use stream"),
    "prompt": ({"prompt": {"id": "pmpt_1"}}, "send instructions and input"),
    "context_management": ({"context_management": [{"type": "compaction"}]}, "use truncation"),
    "stream_options": ({"stream_options": {"include_obfuscation": True}}, "events are not padded"),
    "max_tokens": ({"max_tokens": 5}, "use max_output_tokens"),
    "n": ({"n": 2}, "send several requests"),
    "echo": ({"echo": True}, "use /v1/chat/completions"),
    "max_output_tokens": ({"max_output_tokens": 5000}, "at most 1024 tokens"),
    "temperature": ({"temperature": 3}, "less than or equal to 2"),
    "stop_token_ids": ({"stop_token_ids": [99_999]}, "is not a token id"),
}


@pytest.mark.parametrize("param", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused_by_field(param: str, stream: bool) -> None:
    body, reason = REFUSED[param]
    error = refused(FakeEngine(), RESPONSES, {"input": "a", "stream": stream, **body})
    assert ErrorDetail.model_validate(error).param == param
    assert reason in error["message"]


@pytest.mark.parametrize("body", [{"input": "word " * 2000}, {"input": [MESSAGE], "instructions": "word " * 2000}])
def test_a_prompt_that_does_not_fit(body: dict[str, Any]) -> None:
    error = refused(FakeEngine(), RESPONSES, body)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    engine = FakeEngine()
    respond(engine, {**body, "truncation": "auto", "max_output_tokens": 24})
    assert len(engine.requests[0].token_ids) == 1000


def test_what_openais_client_sends_for_nothing_is_nothing() -> None:
    body = {
        "previous_response_id": None,
        "background": False,
        "store": True,
        "stream_options": {"include_obfuscation": False},
    }
    neutral = {"include": ["reasoning.encrypted_content"], "tools": [], "tool_choice": "auto", "truncation": "disabled"}
    answer = respond(FakeEngine(), {**body, **neutral, "text": {"format": {"type": "text"}, "verbosity": "medium"}})
    assert answer["store"] is False


@pytest.mark.parametrize(
    "asked", ["GET resp_1", "DELETE resp_1", "POST resp_1/cancel", "GET resp_1/input_items", "POST compact"]
)
def test_what_asks_for_a_stored_response(asked: str) -> None:
    method, path = asked.split()
    response = call(app_of(FakeEngine()), method, f"{RESPONSES}/{path}")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "not_stored"
    assert path in error["message"]
    assert "nothing is stored" in error["message"]


def test_errors_before_the_first_event_have_a_status_and_later_ones_an_event() -> None:
    for stream in (False, True):
        dead = FakeEngine(fail_after=0, failure=EngineDead("rank 1: killed"))
        response = post(dead, RESPONSES, {"input": "a", "stream": stream})
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_dead")
    recorder = Recorder()
    dying = FakeEngine(reply=says("Hello there"), fail_after=3, failure=EngineDead("rank 1: killed"))
    events = events_of(app_of(dying, observer=recorder), {})
    *_, error, failed = events
    assert (error["type"], error["code"], error["message"]) == ("error", "engine_dead", "rank 1: killed")
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "rank 1: killed"}
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    (item,) = failed["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", text)
    assert recorder.reasons == ["error"]
