"""From a body of `/v1/responses` to the chat that the model runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from model_runner import RequestError
from serving.api.responses.conversation import Conversation, chat_body, named_as_sent
from serving.api.schema.errors import ApiError
from serving.api.schema.responses_request import ResponsesRequest

USER = {"role": "user", "content": "Hi"}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(*names: str) -> dict[str, Any]:
    return {
        "tool_calls": [
            {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names
        ]
    }


def call(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"call_{name}", "name": name, "arguments": "{}", **more}


def returned(name: str, output: Any = "5") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"call_{name}", "output": output}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


ANSWERED = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
}
TOLD = [{"type": "text", "text": "Hello"}]
RESULT = {"role": "tool", "tool_call_id": "call_f", "content": "5"}

CASES: Mapping[str, tuple[Any, list[dict[str, Any]]]] = {
    "a text": ("Hi", [USER]),
    "messages with and without a type": (
        [{"type": "message", **said("system", "Be nice")}, USER],
        [said("system", "Be nice"), USER],
    ),
    "parts": (
        [said("user", [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])],
        [said("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
    ),
    "a developer's message": ([said("developer", "x"), USER], [said("developer", "x"), USER]),
    "an answer sent back": ([USER, ANSWERED, USER], [USER, said("assistant", TOLD), USER]),
    "a refusal sent back": (
        [USER, said("assistant", [{"type": "refusal", "refusal": "No."}])],
        [USER, said("assistant", [{"type": "text", "text": "No."}])],
    ),
    "a call and its result": (
        [USER, call("f", id="fc_1", status="completed"), returned("f")],
        [USER, {"role": "assistant", **called("f")}, RESULT],
    ),
    "a result in parts": (
        [USER, call("f"), returned("f", [{"type": "input_text", "text": "5"}])],
        [USER, {"role": "assistant", **called("f")}, {**RESULT, "content": [{"type": "text", "text": "5"}]}],
    ),
    "calls at once": (
        [USER, call("f"), call("g"), returned("f"), returned("g")],
        [USER, {"role": "assistant", **called("f", "g")}, RESULT, {**RESULT, "tool_call_id": "call_g"}],
    ),
    "calls after each other": (
        [USER, call("f"), returned("f"), call("g")],
        [USER, {"role": "assistant", **called("f")}, RESULT, {"role": "assistant", **called("g")}],
    ),
    "reasoning, text and a call are one turn": (
        [USER, thought("hm"), ANSWERED, call("f")],
        [USER, {"role": "assistant", "reasoning_content": "hm", "content": TOLD, **called("f")}],
    ),
    "reasoning before a call": (
        [USER, thought("hm"), call("f"), returned("f"), thought("so"), ANSWERED],
        [
            USER,
            {"role": "assistant", "reasoning_content": "hm", **called("f")},
            RESULT,
            {"role": "assistant", "reasoning_content": "so", "content": TOLD},
        ],
    ),
    "a summary in place of reasoning": (
        [
            USER,
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": None},
            USER,
        ],
        [USER, {"role": "assistant", "reasoning_content": "hm"}, USER],
    ),
    "two answers stay two": (
        [USER, said("assistant", "a"), said("assistant", "b")],
        [USER, said("assistant", "a"), said("assistant", "b")],
    ),
    "text after a call is another message": (
        [USER, call("f"), said("assistant", "b")],
        [USER, {"role": "assistant", **called("f")}, said("assistant", "b")],
    ),
}


def body_of(given: Any, **more: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": given, **more})


@pytest.mark.parametrize("name", CASES)
def test_messages(name: str) -> None:
    given, expected = CASES[name]
    conversation = Conversation.of(body_of(given))
    assert conversation.messages == expected
    chat = chat_body(body_of(given), conversation)
    assert [each.model_dump(exclude_unset=True) for each in chat.messages] == expected


def test_instructions_come_first() -> None:
    messages = Conversation.of(body_of([said("developer", "x"), USER], instructions="Be nice")).messages
    assert messages == [said("system", "Be nice"), said("developer", "x"), USER]


NAMED: Mapping[str, str] = {
    "messages": "input",
    "messages.0": "instructions",
    "messages.1.content": "input.0.content",
    "messages.2.role": "input.2.role",
    "messages.2.tool_calls.0.function.arguments": "input.3.arguments",
    "messages.2.tool_calls.1.function.name": "input.4.name",
    "messages.9": "messages.9",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "tools.3.function.parameters": "tools.3.parameters",
    "reasoning_effort": "reasoning.effort",
    "temperature": "temperature",
}


@pytest.mark.parametrize("param", NAMED)
def test_errors_name_what_was_sent(param: str) -> None:
    given = [USER, thought("hm"), ANSWERED, call("f"), call("g")]
    conversation = Conversation.of(body_of(given, instructions="Be nice"))
    own = NAMED[param]
    with pytest.raises(ApiError) as api, named_as_sent(conversation):
        raise ApiError(400, f"{param} is wrong.", param=param, code="c")
    assert (api.value.param, api.value.status, api.value.code) == (own, 400, "c")
    with pytest.raises(RequestError) as plain, named_as_sent(conversation):
        raise RequestError(f"{param} is wrong.", param=param)
    assert plain.value.param == own
    if param != "messages":
        assert str(plain.value) == api.value.message == f"{own} is wrong."
