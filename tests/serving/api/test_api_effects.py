"""Every field of every body changes something: what the engine gets, what is answered, or whether it is refused.

A new field needs a row here, and code that acts on it: without either a test fails.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_clients import app_of, post, tokenizer
from fake_engine import FakeEngine
from pydantic import BaseModel

from serving.api.schema.request_models import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)
from serving.api.schema.responses_request import ReasoningConfig, ResponsesRequest, TextConfig
from serving.turns.parsers import TurnSettings

USER = {"role": "user", "content": "one two three"}
BODIES: Mapping[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "one two three", "max_tokens": 8}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": [USER], "max_tokens": 8}),
    "/v1/responses": (ResponsesRequest, {"input": "one two three", "max_output_tokens": 8}),
    "/tokenize": (TokenizeRequest, {"messages": [USER]}),
    "/detokenize": (DetokenizeRequest, {"tokens": [65, 0]}),
}
EACH = [(path, name) for path, (model, _) in BODIES.items() for name in model.model_fields]
INNER: Mapping[str, tuple[str, type[BaseModel]]] = {
    "stream_options": ("/v1/completions", StreamOptions),
    "text": ("/v1/responses", TextConfig),
    "reasoning": ("/v1/responses", ReasoningConfig),
}
"""Fields with fields of their own."""
OF_INNER = {name: (path, field) for field, (path, model) in INNER.items() for name in model.model_fields}
SETTINGS = ("instructions", "parallel_tool_calls", "reasoning", "text", "tool_choice", "tools", "truncation")
"""Fields that a response repeats, which is no effect."""

CALLED = '<think>So</think>Yes<tool_call>{"name": "f", "arguments": {}}</tool_call>'
_TOLD = yaml.safe_load(Path(__file__).with_name("field_values.yaml").read_text(encoding="utf-8"))
_BESIDE = {"truncation": {"input": "word " * 1500}, **_TOLD["beside"]}
CASES: Mapping[str, tuple[Any, dict[str, Any]]] = {
    name: (value, _BESIDE.get(name, {})) for name, value in _TOLD["values"].items()
}
"""Field -> a value that is not its default, and what must be given with it to count; by path where paths differ."""
OTHER_VALUES = {(path, name): value for path, own in _TOLD["other_values"].items() for name, value in own.items()}
AS_THEY_ARE = {"messages", "prompt", "chat_template_kwargs"}
"""Fields whose strings are texts."""


class Tokenizer:
    """The checkpoint's, with a template that reads all that it can, and a special token in front."""

    chat_template = (
        "{% for m in messages %}[{{ m.role }} {{ m.content }}{% endfor %}{{ 'A:' if add_generation_prompt }}"
        "{{ reasoning_effort }}{{ mood }}{{ tools }}"
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(tokenizer(), name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [*([1] if add_special_tokens else []), *tokenizer().encode(text)]


def seen(path: str, body: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a body leads to: the status, what the engine got, and the answer without what differs each time."""
    ids = [65, 0, 66, 0, 67, 68] if "tools" not in body else [*tokenizer().encode(CALLED * 2), 0]
    engine = FakeEngine(reply=lambda request: ids)
    app = app_of(engine, names=("tiny", "alias"), turns=TurnSettings(True, "hermes", "qwen3"))
    app.state.service.tokenizer = Tokenizer()
    response = post(app, path, body)
    got = [(list(each.token_ids), each.params, each.priority) for each in engine.requests]
    text = response.text
    if path == "/v1/responses" and text.startswith("{"):
        text = json.dumps({name: value for name, value in response.json().items() if name not in SETTINGS})
    text = re.sub(r'"request_id": ?"\w*"|call_\w+', "", text)
    for request in engine.requests[:1]:
        identity = re.split("[-_]", request.group)[-1]
        text = re.sub(r'"(created|created_at|completed_at)": ?\d+', "", text.replace(identity, ""))
    return response.status_code, got, text


def changes(path: str, name: str, value: Any, beside: Mapping[str, Any]) -> bool:
    """Whether a field with this value leads to anything else than a body without it."""
    body = {**BODIES[path][1], **beside.get(path, beside)}
    given = {name: value}
    if name in OF_INNER:
        _, field = OF_INNER[name]
        given = {field: {**body.get(field, {}), name: value}}
    return seen(path, body) != seen(path, {**body, **given})


def in_strings(value: Any) -> Any:
    """A value with strings for its numbers and booleans."""
    match value:
        case list():
            return [in_strings(item) for item in value]
        case dict():
            return {name: in_strings(item) for name, item in value.items()}
        case str():
            return value
        case _:
            return json.dumps(value)


def without_a_case(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields) - CASES.keys()


@pytest.mark.parametrize(("path", "name"), [*EACH, *((path, name) for name, (path, _) in OF_INNER.items())])
def test_every_field_changes_something(path: str, name: str) -> None:
    value, beside = CASES[name]
    assert changes(path, name, OTHER_VALUES.get((path, name), value), beside), f"{name} of {path} changes nothing"


@pytest.mark.wide_sample(4)
@pytest.mark.parametrize(("path", "name"), EACH)
def test_strings_are_read_as_what_they_say(path: str, name: str) -> None:
    """Numbers and booleans may be sent as strings; what a chat template reads is passed on as it is."""
    value, beside = CASES[name]
    value = OTHER_VALUES.get((path, name), value)
    body = {**BODIES[path][1], **beside.get(path, beside), name: value}
    strings = {**body, **{other: in_strings(body[other]) for other in body.keys() - AS_THEY_ARE}}
    assert seen(path, strings) == seen(path, body)


def test_a_field_that_nothing_acts_on_is_found() -> None:
    class WithWish(CompletionRequest):
        wish: int | None = None

    for model in (*(model for model, _ in BODIES.values()), *(model for _, model in INNER.values())):
        assert not without_a_case(model)
    assert without_a_case(WithWish) == {"wish"}
    assert not changes("/v1/completions", "wish", 5, {})
