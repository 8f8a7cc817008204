"""`/v1/chat/completions` over a fake engine, with the checkpoint's chat template."""

from __future__ import annotations

from typing import Any

import pytest
from api_clients import app_of, chat, post, says, stream, token_ids, tokenizer
from fake_engine import FakeEngine
from repository import TINY_MOE

from serving.text.tokenizer import load_tokenizer

PATH = "/v1/chat/completions"


def test_a_conversation_is_written_by_the_template() -> None:
    engine = FakeEngine(reply=says("Fine."))
    parts = [{"type": "text", "text": "How are"}, {"type": "text", "text": "you?"}]
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": parts}]
    answer = chat(engine, {"messages": messages})
    assert tokenizer().decode(token_ids(engine.requests[0])) == "Be short.\nHow are\nyou?\n"
    [choice] = answer["choices"]
    message = {"role": "assistant", "content": "Fine.", "refusal": None}
    assert choice == {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
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
    [choice] = chat(engine, {"logprobs": True, "top_logprobs": 1, "max_tokens": 2})["choices"]
    assert choice["logprobs"]["content"] == [
        {
            "token": rf"bytes:\x{byte:02x}",
            "logprob": -1.5,
            "bytes": [byte],
            "top_logprobs": [{"token": rf"bytes:\x{byte + 1:02x}", "logprob": -1.0, "bytes": [byte + 1]}],
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
        {"tools": [{"type": "function"}], "tool_choice": "none"},
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
    own = load_tokenizer(TINY_MOE)
    own.chat_template = template
    app = app_of(FakeEngine())
    app.state.service.tokenizer = own
    response = post(app, PATH, {"messages": [{"role": "user", "content": "a"}]})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
