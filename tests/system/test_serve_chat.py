"""`ubatch serve` with a chat model, as clients meet it: names, conversations with tools, and turns that end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serve_processes import PATIENCE_S, Server, running

pytestmark = pytest.mark.server

MODEL = "examples/models/tiny-chat"
NAMES = ("chat-model", "chat-model-1")
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CONVERSATION = [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": "How warm is it in Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "22"},
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    names = [word for name in NAMES for word in ("--served-model-name", name)]
    with running(MODEL, *names, "--dtype", "float32", "--port", "0") as server:
        server.wait_for("ready on")
        yield server


def post(server: Server, path: str, **body: Any) -> Any:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_all_names_are_served(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        assert tuple(card["id"] for card in client.get("/v1/models").json()["data"]) == NAMES
        assert f'model_name="{NAMES[0]}"' in client.get("/metrics").text
    for name in NAMES:
        assert post(server, "/v1/completions", model=name, prompt="a", max_tokens=1)["model"] == name


def test_a_conversation_with_tools_is_answered(server: Server) -> None:
    answer = post(server, "/v1/chat/completions", messages=CONVERSATION, temperature=0, max_tokens=200)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].startswith("<think>\n")
    tokens = post(server, "/tokenize", messages=CONVERSATION)["tokens"]
    text = post(server, "/detokenize", tokens=tokens)["prompt"]
    assert "<|im_start|>system\nBe short.<|im_end|>" in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>' in text
