"""`/v1/chat/completions` over a fake engine: messages reach the model as the checkpoint's template reads them."""

import json
from typing import Any

import pytest
from api_clients import CHAT, app_with, chat, post, post_bytes, refused, says, stream, token_ids, tokenizer
from chat_templates import TEMPLATES
from fake_engine import FakeEngine

PATH = CHAT
USER = {"role": "user", "content": "How warm is it?"}
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None}
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "content": "22"}


def test_a_conversation_is_written_by_the_template() -> None:
    engine = FakeEngine(reply=says("Fine."))
    parts = [{"type": "text", "text": "How are"}, {"type": "text", "text": "you?"}]
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": parts}]
    answer = chat(engine, {"messages": messages})
    assert tokenizer().decode(token_ids(engine.requests[0])) == "Be short.\nHow are\nyou?\n"
    [choice] = answer["choices"]
    assert (choice["message"]["role"], choice["message"]["content"]) == ("assistant", "Fine.")
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")


def test_it_goes_on_to_the_end_of_the_context() -> None:
    engine = FakeEngine()
    chat(engine, {"messages": [{"role": "user", "content": "Hello"}]})
    [request] = engine.requests
    assert len(request.token_ids) + request.params.max_tokens == engine.info.max_model_len
    for name in ("max_tokens", "max_completion_tokens"):
        chat(engine, {name: 5})
        assert engine.requests[-1].params.max_tokens == 5
    chat(engine, {"max_tokens": 7, "max_completion_tokens": 6})
    assert engine.requests[-1].params.max_tokens == 6


def test_log_probabilities() -> None:
    engine = FakeEngine(reply=says("é"))
    [choice] = chat(engine, {"logprobs": True, "top_logprobs": 2, "max_tokens": 2})["choices"]
    assert choice["logprobs"]["content"] == [
        {
            "token": rf"bytes:\x{byte:02x}",
            "logprob": -1.5,
            "bytes": [byte],
            "top_logprobs": [
                {"token": rf"bytes:\x{byte:02x}", "logprob": -1.5, "bytes": [byte]},
                {"token": rf"bytes:\x{byte + 1:02x}", "logprob": -1.0, "bytes": [byte + 1]},
            ],
        }
        for byte in "é".encode()
    ]
    [choice] = chat(engine, {"logprobs": True, "max_tokens": 1})["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []
    events = stream(engine, PATH, {"logprobs": True, "max_tokens": 2})
    told = [event["choices"][0]["logprobs"] for event in events]
    assert [entry["bytes"] for part in told if part for entry in part["content"]] == [[0xC3], [0xA9]]


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "text"}},
        {"tool_choice": "none"},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
        {"messages": [{"role": "tool", "content": "4", "tool_call_id": "x"}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "user", "content": "a"}]},
        {"reasoning_effort": "low", "store": False, "metadata": {"a": "b"}, "user": "me"},
    ],
)
def test_what_is_accepted(body: dict[str, Any]) -> None:
    assert chat(FakeEngine(), {"max_tokens": 1, **body})["choices"]


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ raise_exception('roles must alternate') }}", "roles must alternate"), (None, "no chat template")],
)
def test_templates_that_refuse(template: str | None, message: str) -> None:
    assert message in refused(app_with(template, FakeEngine()), PATH, {"messages": [USER]})["message"]


# -- other templates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "messages", "read"),
    [
        ("qwen 2.5", (USER, CALLING, RESULT), '{"name": "weather", "arguments": {"city": "Rome"}}'),
        ("glm 4.5", (USER, CALLING, RESULT), "weather<arg_key>city</arg_key>Rome"),
        ("deepseek v3", (USER, CALLING, RESULT), '<call>weather<sep>{"city": "Rome"}</call>'),
        ("llama 3.1", (USER, {"role": "assistant", "content": "Warm.", "tool_calls": []}), "Warm."),
        ("llava, parts alone", (USER,), "USER: How warm is it? "),
        ("llava, parts alone", ({"role": "system", "content": "Be short."}, USER), "SYSTEM: Be short. "),
        ("phi 3", ({"role": "developer", "content": "Be short."}, USER), "<|system|>\nBe short.<|end|>"),
        ("qwen 3 next", ({"role": "developer", "content": "Be short."}, USER), "<|im_start|>system\nBe short."),
        ("chatml", ({"role": "developer", "content": "Be short."}, USER), "<|im_start|>developer\nBe short."),
    ],
)
def test_messages_as_the_template_reads_them(name: str, messages: tuple[dict[str, Any], ...], read: str) -> None:
    engine = FakeEngine()
    chat(app_with(TEMPLATES[name], engine), {"messages": messages, "max_tokens": 1})
    text = tokenizer().decode(token_ids(engine.requests[0]))
    assert read in text
    assert "None" not in text


def test_the_tokens_are_told_alike() -> None:
    """`/tokenize` writes the same text."""
    engine = FakeEngine()
    app = app_with(TEMPLATES["glm 4.5"], engine)
    chat(app, {"messages": [USER, CALLING, RESULT], "max_tokens": 1})
    told = post(app, "/tokenize", {"messages": [USER, CALLING, RESULT]}).json()["tokens"]
    assert told == token_ids(engine.requests[0])


@pytest.mark.parametrize(
    ("name", "messages", "param"),
    [
        ("phi 3", [USER, RESULT], "messages.1.role"),
        (
            "qwen 2.5",
            [USER, {**CALLING, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages.1.tool_calls.0.function.arguments",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_by_place(name: str, messages: list[dict[str, Any]], param: str) -> None:
    for path in (PATH, "/tokenize"):
        assert refused(app_with(TEMPLATES[name], FakeEngine()), path, {"messages": messages})["param"] == param


@pytest.mark.parametrize("name", ["chatml", "qwen 2 vl", "llava, parts alone", "idefics, parts by line"])
def test_the_echo_of_parts_is_what_the_prompt_has(name: str) -> None:
    begun = {"role": "assistant", "content": [{"type": "text", "text": "It"}, {"type": "text", "text": "is"}]}
    engine = FakeEngine(reply=says(" warm."))
    body = {"messages": [USER, begun], "continue_final_message": True, "echo": True}
    content = chat(app_with(TEMPLATES[name], engine), body)["choices"][0]["message"]["content"]
    assert tokenizer().decode(token_ids(engine.requests[0])).endswith(content.removesuffix(" warm."))
    assert content in ("It\nis warm.", "Itis warm.")


@pytest.mark.parametrize("depth", [50, 400, 900])
@pytest.mark.parametrize("name", ["arguments", "other"])
def test_nested_values_are_no_fault_of_the_server(name: str, depth: int) -> None:
    nested: Any = 1
    for _ in range(depth):
        nested = {"a": nested}
    message: dict[str, Any] = {"role": "assistant", "content": None, "other": nested}
    if name == "arguments":
        message = {**CALLING, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": nested}}]}
    body = json.dumps({"messages": [USER, message], "max_tokens": 1})
    response = post_bytes(app_with(TEMPLATES["qwen 2.5"], FakeEngine()), PATH, body)
    assert response.status_code in (200, 400), response.text
