"""Tools and reasoning in chats: what the model is shown, what is enforced, and what clients get, streamed or not."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest
from api_clients import CHAT, MODEL, app_with, chat, client_of, events_of, post, refused, says, stream, tokenizer
from fake_engine import FakeEngine
from fastapi import FastAPI

from serving.api.schema.request_models import MAX_TOOLS
from serving.text.tokenizer import Vocabulary
from serving.turns.parsers import TurnSettings

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}{{ m.reasoning_content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.city }}>{% endfor %}]"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{{ 'A:' if add_generation_prompt }}"
    "{{ '<think></think>' if enable_thinking is defined and not enable_thinking }}"
)
WITHOUT_TOOLS = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
USER = {"role": "user", "content": "Weather in Paris?"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str, parameters: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A definition."""
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **more, **given}}


TOOLS = [tool("get_weather", SCHEMA, description="The weather of a city"), tool("now")]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "P\\u00e4ris {"}}\n</tool_call>'
ARGUMENTS = '{"city": "P\\u00e4ris {"}'
AUTO = TurnSettings(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")


def served(
    text: str, turns: TurnSettings = AUTO, template: Any = TEMPLATE, special: Sequence[str] = (), **engine: Any
) -> tuple[FastAPI, FakeEngine]:
    """An application whose model says a text; some words are special tokens of its tokenizer."""
    fake = FakeEngine(reply=says(text), **engine)
    app = app_with(template, fake)
    own = app.state.service.tokenizer
    app.state.service.turns = turns
    if special:
        own.add_special_tokens({"additional_special_tokens": [*special]})
        Vocabulary._known.pop(own)  # it was looked at when it was loaded
        ids = [*own.encode(text), 0]
        fake.reply = lambda request: ids
    return app, fake


def prompt(engine: FakeEngine) -> str:
    """What the model was shown."""
    text: str = tokenizer().decode(engine.requests[-1].token_ids)
    return text


def message(app: FastAPI, **body: Any) -> tuple[dict[str, Any], str]:
    """A whole answer's message and finish reason; a stream of the same is put together to the same, ids aside."""
    body = {"tools": TOOLS, "max_tokens": 200, **body}
    choice = chat(app, body)["choices"][0]
    whole, finish = choice["message"], choice["finish_reason"]
    said: dict[str, Any] = {"content": ""}
    for event in stream(app, CHAT, body):
        (part,) = event["choices"]
        delta = part["delta"]
        for name in ("content", "reasoning", "reasoning_content"):
            if delta.get(name):
                said[name] = said.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert set(call) == {"index", "id", "type", "function"}
                assert call["function"]["arguments"] == ""
                said.setdefault("tool_calls", []).append({"type": call["type"], "function": {**call["function"]}})
            else:
                assert set(call) == {"index", "function"}
                said["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert part["finish_reason"] == finish
    if not said["content"] and len(said) > 1:
        said["content"] = None
    calls = [{name: call[name] for name in ("type", "function")} for call in whole.get("tool_calls") or ()]
    assert {name: whole[name] for name in said if name != "tool_calls"} == {
        name: text for name, text in said.items() if name != "tool_calls"
    }
    assert calls == said.get("tool_calls", [])
    return whole, finish


def test_the_model_is_shown_the_tools() -> None:
    app, engine = served("Hi")
    chat(app, {"tools": TOOLS, "messages": [USER]})
    assert prompt(engine) == f"[user:Weather in Paris?]{json.dumps(TOOLS)}A:"
    chat(app, {"tools": TOOLS, "messages": [USER], "tool_choice": "none"})
    assert "get_weather" in prompt(engine)
    app.state.service.turns = TurnSettings(exclude_tools_when_tool_choice_none=True)
    chat(app, {"tools": TOOLS, "messages": [USER], "tool_choice": "none"})
    assert prompt(engine) == "[user:Weather in Paris?]A:"
    shown = post(app, "/tokenize", {"messages": [USER], "tools": TOOLS, "return_token_strs": True}).json()
    assert shown["count"] > len(engine.requests[-1].token_ids)


def test_a_template_for_tools_is_used_with_tools() -> None:
    app, engine = served("Hi", template={"default": WITHOUT_TOOLS, "tool_use": TEMPLATE})
    chat(app, {"messages": [USER]})
    assert prompt(engine) == "userWeather in Paris?"
    chat(app, {"messages": [USER], "tools": TOOLS})
    assert "get_weather" in prompt(engine)


def test_calls_results_and_reasoning_of_earlier_turns_are_shown() -> None:
    app, engine = served("Sunny.")
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    for name in ("reasoning", "reasoning_content"):
        asked = {"role": "assistant", "content": None, "tool_calls": [call], name: "hm"}
        result = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
        chat(app, {"messages": [USER, asked, result], "tools": TOOLS})
        assert prompt(engine).startswith("[user:Weather in Paris?][assistant:hm<get_weather Paris>][tool:sunny]")


@pytest.mark.parametrize(
    ("text", "content", "names", "finish"),
    [
        ("Hello", "Hello", [], "stop"),
        (CALL, None, ["get_weather"], "tool_calls"),
        (f"I look.\n{CALL}\n{CALL}", "I look.\n", ["get_weather"] * 2, "tool_calls"),
        ("<tool_call>{", "<tool_call>{", [], "stop"),
    ],
)
def test_calls_that_the_model_decides_on(text: str, content: str | None, names: list[str], finish: str) -> None:
    app, engine = served(text)
    said, reason = message(app)
    assert (said["content"], reason) == (content, finish)
    calls = said.get("tool_calls") or []
    assert [call["function"]["name"] for call in calls] == names
    assert all(call["function"]["arguments"] == ARGUMENTS for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    assert engine.requests[-1].params.grammar is None


def test_an_output_that_is_cut_off_ended_by_its_length() -> None:
    app, _ = served(f"{CALL}\n{CALL}")
    assert message(app, max_tokens=len(tokenizer().encode(CALL)) + 3)[1] == "length"


def test_one_call_where_several_may_not_be_made() -> None:
    app, _ = served(CALL * 3)
    assert len(message(app, parallel_tool_calls=False)[0]["tool_calls"]) == 1


def test_no_call_where_none_may_be_made() -> None:
    app, _ = served(CALL)
    assert message(app, tool_choice="none")[0]["content"] == CALL


@pytest.mark.parametrize("turns", [AUTO, TurnSettings()])
def test_a_call_that_must_be_made_is_enforced(turns: TurnSettings) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed; `make setup` installs it")
    app, engine = served(
        '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "now", "parameters": {}}]', turns
    )
    said, finish = message(app, tool_choice="required")
    assert finish == "tool_calls"
    assert said["content"] is None
    assert [call["function"] for call in said["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"name": "now", "arguments": "{}"},
    ]
    grammar = engine.requests[-1].params.grammar
    assert grammar is not None
    assert '"maxItems": 1' not in grammar
    assert all(f'"{name}"' in grammar for name in ("get_weather", "now", "city"))
    assert ("think" in grammar) == (turns is AUTO)
    message(app, tool_choice="required", parallel_tool_calls=False)
    grammar = engine.requests[-1].params.grammar
    assert grammar is not None
    assert '"maxItems": 1' in grammar


def test_the_call_that_must_be_made_is_enforced() -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed; `make setup` installs it")
    app, engine = served('{"city": "Paris"}')
    said, finish = message(app, tool_choice=NAMED)
    assert finish == "stop"
    (call,) = said["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    grammar = engine.requests[-1].params.grammar
    assert grammar is not None
    assert '"now"' not in grammar


def test_references_of_a_tool_are_its_own() -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed; `make setup` installs it")
    app, engine = served("[]")
    city = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"]}
    tools = [tool(name, {**city, "$defs": {"City": {"const": name}}}) for name in ("one", "two")]
    chat(app, {"tools": tools, "tool_choice": "required"})
    grammar = engine.requests[-1].params.grammar
    assert grammar is not None
    assert "#/$defs/City" not in grammar
    assert '"const": "one"' in grammar
    assert '"const": "two"' in grammar


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"tools": TOOLS}, "tool_choice", "--enable-auto-tool-choice and --tool-call-parser"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice", "--enable-auto-tool-choice"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice", "no tools"),
        ({"tools": [tool("now")], "tool_choice": NAMED}, "tool_choice", "'get_weather', which is not among"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'none', 'auto', 'required', or"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "'none', 'auto'"),
        ({"tools": [tool("now"), tool("now")]}, "tools", "2 tools have the name 'now'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "missing"),
        ({"tools": [tool("two words")]}, "tools.0.function.name", "pattern"),
        ({"tools": [tool("x" * 257)]}, "tools.0.function.name", "256"),
        ({"tools": [tool("f", {"type": "array"})]}, "tools.0.function.parameters", "object, not 'array'"),
        ({"tools": [tool("f", 5)]}, "tools.0.function.parameters", "dictionary"),  # type: ignore[arg-type]
        ({"tools": [tool(f"f{n}") for n in range(MAX_TOOLS + 1)]}, "tools", "at most 1024"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools and tool_choice"),
        ({"function_call": {"name": "f"}}, "function_call", "use tools and tool_choice"),
    ],
)
def test_refusals(body: dict[str, Any], param: str, reason: str) -> None:
    app, _ = served("Hi", TurnSettings())
    error = refused(app, CHAT, {"model": MODEL, "messages": [USER], **body})
    assert error["param"] == param
    assert reason in error["message"]


def test_a_schema_that_cannot_be_enforced_is_refused_by_name() -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed; `make setup` installs it")
    app, _ = served("Hi")
    bad = {"type": "object", "properties": {"x": {"not": {}}}}
    body = {"messages": [USER], "tools": [*TOOLS, tool("f", bad)]}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        error = refused(app, CHAT, {**body, "tool_choice": choice})
        assert error["param"] == "tools.2.function.parameters", error
        assert error["message"].startswith("tools.2.function.parameters: properties.x.not: not is not supported")
    none = {"messages": [USER], "tools": [tool("f", {"type": "object", "properties": {"x": False}, "required": ["x"]})]}
    assert refused(app, CHAT, {**none, "tool_choice": "required"})["param"] == "tools", "the library says no place"
    assert post(app, CHAT, body).status_code == 200


def test_a_template_that_shows_no_tools_is_refused() -> None:
    app, _ = served("Hi", template=WITHOUT_TOOLS)
    assert refused(app, CHAT, {"messages": [USER], "tools": TOOLS})["param"] == "tools"
    assert post(app, CHAT, {"messages": [USER], "tools": TOOLS, "tool_choice": "none"}).status_code == 200


def test_reasoning() -> None:
    app, engine = served(f"<think>Hm, {'so ' * 5}</think>{CALL}")
    said, finish = message(app)
    assert said["reasoning"] == said["reasoning_content"] == f"Hm, {'so ' * 5}"
    assert (said["content"], finish) == (None, "tool_calls")
    said = chat(app, {"include_reasoning": False})["choices"][0]["message"]
    assert said["reasoning"] is said["reasoning_content"] is None
    assert said["content"].startswith("<tool_call>")
    said = chat(app, {"separate_reasoning": False})["choices"][0]["message"]
    assert said["content"].startswith("<think>Hm, ")
    answer = chat(app, {"chat_template_kwargs": {"enable_thinking": False}})
    assert prompt(engine).endswith("A:<think></think>")
    assert answer["choices"][0]["message"]["content"].startswith("<think>Hm, ")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_reasoning_tokens_are_counted() -> None:
    app, _ = served("<think>ab</think>c", special=("<think>", "</think>"))
    own = app.state.service.tokenizer
    for body in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        response = post(app, CHAT, {"messages": [USER], **body})
        usage = events_of(response)[-1]["usage"] if body else response.json()["usage"]
        counts = usage["completion_tokens_details"]["reasoning_tokens"]
        assert counts == len(own.encode("ab"))
        assert usage["completion_tokens"] == counts + len(own.encode("c")) + 3


def test_marks_that_are_special_tokens_are_read_and_not_shown() -> None:
    marks = ("[TOOL_CALLS]", "[ARGS]", "[OTHER]")
    turns = TurnSettings(True, "mistral")
    app, _ = served("a[OTHER][TOOL_CALLS]now[ARGS]{}", turns, special=marks)
    said, _ = message(app)
    assert said["content"] == "a"
    assert said["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    app, _ = served("a[TOOL_CALLS]now[ARGS]?", turns, special=marks)
    assert message(app)[0]["content"] == "anow?"
    assert message(app, skip_special_tokens=False)[0]["content"] == "a[TOOL_CALLS]now[ARGS]?"
    assert message(app, tool_choice="none")[0]["content"] == "anow?"


def test_every_output_has_a_turn_of_its_own_and_log_probabilities_stay_with_their_tokens() -> None:
    app, _ = served(CALL)
    body = {"tools": TOOLS, "n": 2, "logprobs": True, "top_logprobs": 1}
    answer = chat(app, body)
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]]
    assert len(set(ids)) == 2
    count = len(tokenizer().encode(CALL)) + 1
    assert [len(choice["logprobs"]["content"]) for choice in answer["choices"]] == [count, count]
    streamed = [0, 0]
    for event in stream(app, CHAT, body):
        (choice,) = event["choices"]
        streamed[choice["index"]] += len((choice["logprobs"] or {"content": ()})["content"])
    assert streamed == [count, count]


def test_steps_of_several_tokens() -> None:
    app, _ = served(f"Hm.{CALL}{CALL}", tokens_per_step=7)
    said, _ = message(app)
    assert [call["function"]["arguments"] for call in said["tool_calls"]] == [ARGUMENTS] * 2


@pytest.mark.long
def test_the_clients_own_helpers() -> None:
    """The openai client puts a stream together, and parses arguments by a strict tool's schema."""
    import openai

    app, _ = served(f"<think>Hm</think>Look.{CALL}{CALL}")
    strict: Any = tool("get_weather", {**SCHEMA, "additionalProperties": False}, strict=True)

    async def run() -> None:
        transport: httpx.AsyncClient = client_of(app)
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=transport) as client:
            asked: Any = {"model": MODEL, "messages": [USER], "tools": [strict]}
            async with client.chat.completions.stream(**asked) as helper:
                events = [event async for event in helper]
                streamed = (await helper.get_final_completion()).choices[0]
            parsed = (await client.chat.completions.parse(**asked)).choices[0]
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert [event.arguments for event in done] == [ARGUMENTS] * 2
        for choice in (streamed, parsed):
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "Look."
            calls = choice.message.tool_calls
            assert calls is not None
            assert [call.function.parsed_arguments for call in calls] == [{"city": "Päris {"}] * 2

    asyncio.run(run())


@pytest.mark.long
def test_definitions_of_ten_megabytes() -> None:
    """They are refused in bounded time, and meanwhile others are answered."""
    app, _ = served("Hi")
    large = [tool(f"f{n}", SCHEMA, description="word " * 20_000) for n in range(100)]

    async def run() -> tuple[int, str, int]:
        async with client_of(app) as client:
            task = asyncio.create_task(client.post(CHAT, json={"messages": [USER], "tools": large}))
            answered = 0
            while not task.done():
                answered += (await client.post(CHAT, json={"messages": [USER], "max_tokens": 1})).status_code == 200
            response = task.result()
            return response.status_code, response.json()["error"]["code"], answered

    status, code, answered = asyncio.run(run())
    assert (status, code) == (400, "context_length_exceeded")
    assert answered
    many = [tool(f"f{n}", {"type": "object", "properties": {f"p{m}": {} for m in range(50)}}) for n in range(1000)]
    assert post(app, CHAT, {"messages": [USER], "tools": many}).json()["error"]["code"] == "body_too_complex"
