"""`/v1/responses` in parts: from a body to the chat, from a turn to items and events; the document's table of both."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from api_clients import app_with, call, post, says
from fake_engine import FakeEngine
from repository import ROOT

from model_runner import RequestError
from serving.api.responses.answer import OutputItems
from serving.api.responses.conversation import Conversation, chat_body, named_as_sent
from serving.api.schema.errors import ApiError
from serving.api.schema.responses_request import ResponsesRequest
from serving.turns.marked import ToolCallDelta, TurnDelta
from serving.turns.parsers import TurnSettings

USER = {"role": "user", "content": "Hi"}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(*names: str) -> dict[str, Any]:
    return {
        "tool_calls": [
            {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names
        ]
    }


def function_call(name: str, **more: Any) -> dict[str, Any]:
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
        [USER, function_call("f", id="fc_1", status="completed"), returned("f")],
        [USER, {"role": "assistant", **called("f")}, RESULT],
    ),
    "a result in parts": (
        [USER, function_call("f"), returned("f", [{"type": "input_text", "text": "5"}])],
        [USER, {"role": "assistant", **called("f")}, {**RESULT, "content": [{"type": "text", "text": "5"}]}],
    ),
    "calls at once": (
        [USER, function_call("f"), function_call("g"), returned("f"), returned("g")],
        [USER, {"role": "assistant", **called("f", "g")}, RESULT, {**RESULT, "tool_call_id": "call_g"}],
    ),
    "calls after each other": (
        [USER, function_call("f"), returned("f"), function_call("g")],
        [USER, {"role": "assistant", **called("f")}, RESULT, {"role": "assistant", **called("g")}],
    ),
    "reasoning, text and a call are one turn": (
        [USER, thought("hm"), ANSWERED, function_call("f")],
        [USER, {"role": "assistant", "reasoning_content": "hm", "content": TOLD, **called("f")}],
    ),
    "reasoning before a call": (
        [USER, thought("hm"), function_call("f"), returned("f"), thought("so"), ANSWERED],
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
        [USER, function_call("f"), said("assistant", "b")],
        [USER, {"role": "assistant", **called("f")}, said("assistant", "b")],
    ),
}


def body_of(given: Any, **more: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": given, **more})


@pytest.mark.parametrize("name", CASES)
def test_messages(name: str) -> None:
    given, expected = CASES[name]
    conversation = Conversation(body_of(given))
    assert conversation.messages == expected
    chat = chat_body(body_of(given), conversation)
    assert [each.model_dump(exclude_unset=True) for each in chat.messages] == expected


def test_instructions_come_first() -> None:
    messages = Conversation(body_of([said("developer", "x"), USER], instructions="Be nice")).messages
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
    given = [USER, thought("hm"), ANSWERED, function_call("f"), function_call("g")]
    conversation = Conversation(body_of(given, instructions="Be nice"))
    own = NAMED[param]
    with pytest.raises(ApiError) as api, named_as_sent(conversation):
        raise ApiError(400, f"{param} is wrong.", param=param, code="c")
    assert (api.value.param, api.value.status, api.value.code) == (own, 400, "c")
    with pytest.raises(RequestError) as plain, named_as_sent(conversation):
        raise RequestError(f"{param} is wrong.", param=param)
    assert plain.value.param == own
    if param != "messages":
        assert str(plain.value) == api.value.message == f"{own} is wrong."


CALL = ToolCallDelta(0, "call_a", "add", '{"a":')
TURNS: Mapping[str, tuple[Sequence[TurnDelta], list[str]]] = {
    "nothing": ([], ["message:"]),
    "text": ([TurnDelta("a"), TurnDelta("b")], ["message:ab"]),
    "reasoning, then text": ([TurnDelta(reasoning="why"), TurnDelta("so")], ["reasoning:why", "message:so"]),
    "both at once": ([TurnDelta("so", "why")], ["reasoning:why", "message:so"]),
    "a call": (
        [TurnDelta(tool_calls=(CALL,)), TurnDelta(tool_calls=(ToolCallDelta(0, arguments="1}"),))],
        ['add:{"a":1}'],
    ),
    "two calls at once": ([TurnDelta(tool_calls=(CALL, ToolCallDelta(1, "call_b", "now")))], ['add:{"a":', "now:"]),
    "text around a call": (
        [TurnDelta("a"), TurnDelta(tool_calls=(CALL,)), TurnDelta("b")],
        ["message:a", 'add:{"a":', "message:b"],
    ),
    "reasoning twice": (
        [TurnDelta(reasoning="x"), TurnDelta("a"), TurnDelta(reasoning="y")],
        ["reasoning:x", "message:a", "reasoning:y"],
    ),
}
TEXT_DONE = {"message": "response.output_text.done", "reasoning": "response.reasoning_text.done"}


def plain(value: Any) -> Any:
    """As a client reads it."""
    return msgspec.json.decode(msgspec.json.encode(value))


def written(turns: Sequence[TurnDelta], *, complete: bool = True) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events and the items of some turns."""
    output = OutputItems("x")
    events = [plain(event) for turn in turns for event in output.take(turn)]
    events += [plain(event) for event in output.finish(complete=complete)]
    return events, plain(output.items)


def shown(item: Mapping[str, Any]) -> str:
    if item["type"] == "function_call":
        return f"{item['name']}:{item['arguments']}"
    return f"{item['type']}:{''.join(part['text'] for part in item['content'])}"


@pytest.mark.parametrize("name", TURNS)
def test_items_of_a_turn(name: str) -> None:
    turns, expected = TURNS[name]
    events, items = written(turns)
    assert [shown(item) for item in items] == expected
    assert {item["status"] for item in items} == {"completed"}
    assert len({item["id"] for item in items}) == len(items)
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == items


@pytest.mark.parametrize("name", TURNS)
def test_events_build_what_they_end_with(name: str) -> None:
    """A client that only adds up deltas has the items, one after another."""
    events, items = written(TURNS[name][0])
    open_item: dict[str, Any] | None = None
    built: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert open_item is None
            open_item = event["item"]
            assert (open_item["status"], event["output_index"]) == ("in_progress", len(built))
            continue
        assert open_item is not None
        assert event["output_index"] == len(built)
        assert event.get("item_id", open_item["id"]) == open_item["id"]
        if kind == "response.content_part.added":
            assert event["content_index"] == len(open_item["content"])
            open_item["content"].append(event["part"])
        elif kind == "response.function_call_arguments.delta":
            open_item["arguments"] += event["delta"]
        elif kind.endswith("_text.delta"):
            open_item["content"][0]["text"] += event["delta"]
        elif kind == "response.function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (open_item["arguments"], open_item["name"])
        elif kind.endswith("_text.done"):
            assert kind == TEXT_DONE[open_item["type"]]
            assert event["text"] == open_item["content"][0]["text"]
        elif kind == "response.content_part.done":
            assert event["part"] == open_item["content"][0]
        else:
            assert kind == "response.output_item.done"
            built.append({**open_item, "status": "completed"})
            open_item = None
    assert built == items


def test_what_is_cut_is_incomplete() -> None:
    _, items = written([TurnDelta("a"), TurnDelta(tool_calls=(CALL,))], complete=False)
    assert [(shown(item), item["status"]) for item in items] == [
        ("message:a", "completed"),
        ('add:{"a":', "incomplete"),
    ]


def entry(token: str) -> dict[str, Any]:
    return {
        "token": token,
        "logprob": -1.0,
        "bytes": [1],
        "top_logprobs": [{"token": "o", "logprob": -2.0, "bytes": [2]}],
    }


def test_logprobs_are_with_the_text_that_their_tokens_made() -> None:
    """Those of reasoning and calls are left out; those of a token whose text is held back come with the next text."""
    output = OutputItems("x")
    parts = [(TurnDelta(reasoning="r"), "r"), (TurnDelta(), "h"), (TurnDelta("text"), "t"), (TurnDelta(), "end")]
    events = [event for turn, token in parts for event in output.take(turn, [entry(token)])]
    events += output.finish(complete=True)
    deltas = [event for event in plain(events) if event["type"] == "response.output_text.delta"]
    assert [(event["delta"], [each["token"] for each in event["logprobs"]]) for event in deltas] == [
        ("text", ["h", "t"]),
        ("", ["end"]),
    ]
    assert "bytes" not in deltas[0]["logprobs"][0]
    (part,) = plain(output.items[1])["content"]
    assert part["logprobs"] == [entry("h"), entry("t"), entry("end")]


DOCUMENT = ROOT / "docs" / "api.md"
TOOL = {"type": "function", "name": "f"}
OF_REASONING: Mapping[str, Any] = {
    "content": [{"type": "reasoning_text", "text": "a"}],
    "summary": [{"type": "summary_text", "text": "a"}],
    "encrypted_content": "a",
}


def item(kind: str) -> dict[str, Any]:
    """An item with all that any of its type may need."""
    own = {"type": kind, "id": "x", "call_id": "c", "name": "f", "arguments": "{}", "output": "a", "summary": []}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    return {"input": [call, {**own, **(USER if kind == "message" else {})}]}


def part(kind: str) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": kind, "text": "a", "refusal": "a"}]}]}


def choice(kind: str) -> dict[str, Any]:
    if kind in ("none", "auto", "required"):
        return {"tools": [TOOL], "tool_choice": kind}
    return {"tools": [TOOL], "tool_choice": {"type": kind, "name": "f", "mode": "auto", "tools": [TOOL]}}


ROW_BODIES: Mapping[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "items of the input": ("input.1", item),
    "parts of messages and results": ("input.0.content.0", part),
    "reasoning items": (
        "input.0.encrypted_content",
        lambda name: {"input": [{"type": "reasoning", "summary": [], name: OF_REASONING[name]}, USER]},
    ),
    "tools": ("tools.0", lambda kind: {"tools": [{"type": kind, "name": "f"}]}),
    "tool_choice": ("tool_choice", choice),
    "text.format": (
        "text.format",
        lambda kind: {"text": {"format": {"type": kind, "name": "x", "schema": {"type": "object"}}}},
    ),
    "text.verbosity": ("text.verbosity", lambda value: {"text": {"verbosity": value}}),
    "reasoning.effort": ("reasoning.effort", lambda value: {"reasoning": {"effort": value}}),
    "reasoning.summary": ("reasoning.summary", lambda value: {"reasoning": {"summary": value}}),
    "include": ("include.0", lambda value: {"include": [value]}),
    "truncation": ("truncation", lambda value: {"truncation": value}),
}
"""Row of the table -> the field that a refusal names, and a body with a value."""


def rows() -> dict[str, tuple[list[str], list[str]]]:
    """Row -> what works, and what is refused."""
    (section,) = re.findall(r"^## Responses$(.*?)^## ", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.M)
    _, _, *table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    names = re.compile(r"`([^`]+)`")
    return {what.strip(" `"): (names.findall(works), names.findall(refused)) for what, works, refused in table}


ROWS = rows()


def app() -> Any:
    made = app_with("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", FakeEngine(reply=says("a")))
    made.state.service.turns = TurnSettings(True, "hermes")
    return made


@pytest.mark.long
@pytest.mark.wide_sample(3)
@pytest.mark.parametrize("row", ROW_BODIES)
def test_the_table_is_true(row: str) -> None:
    param, body = ROW_BODIES[row]
    works, refused = ROWS[row]
    for value in works:
        response = post(app(), "/v1/responses", {"input": "a", **body(value)})
        assert response.status_code == 200, (value, response.text)
    for value in refused:
        response = post(app(), "/v1/responses", {"input": "a", **body(value)})
        assert response.status_code == 400, value
        assert response.json()["error"]["param"] == param, value


def test_end_points() -> None:
    works, refused = ROWS["end points"]
    for place in (*works, *refused):
        method, path = place.replace("{id}", "resp_1").split()
        response = call(app(), method, path, json={"input": "a"})
        assert response.status_code == (200 if place in works else 404)
    assert ROWS.keys() == {*ROW_BODIES, "end points"}
