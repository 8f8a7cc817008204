"""Every field of every body changes something: what the engine gets, what is answered, or whether it is refused.

A new field needs a row here, and code that acts on it: without either a test fails.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
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

USER = {"role": "user", "content": "one two three"}
BODIES: Mapping[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "one two three", "max_tokens": 8}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": [USER], "max_tokens": 8}),
    "/tokenize": (TokenizeRequest, {"messages": [USER]}),
    "/detokenize": (DetokenizeRequest, {"tokens": [65, 0]}),
}
EACH = [(path, name) for path, (model, _) in BODIES.items() for name in model.model_fields]

STREAM, OPTIONS = {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}
SCORED: dict[str, Any] = {"/v1/completions": {"logprobs": 1}, "/v1/chat/completions": {"logprobs": True}}
CASES: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "model": ("alias", {}),
    "prompt": ("four", {"messages": None}),
    "messages": ([{"role": "user", "content": "four"}], {}),
    "tokens": ([66], {}),
    # sampling
    "n": (2, {}),
    "best_of": (3, {}),
    "seed": (5, {}),
    "temperature": (0.5, {}),
    "top_p": (0.5, {}),
    "top_k": (5, {}),
    "min_p": (0.5, {}),
    "presence_penalty": (1.5, {}),
    "frequency_penalty": (1.5, {}),
    "repetition_penalty": (1.5, {}),
    "logit_bias": ({"5": 1}, {}),
    "allowed_token_ids": ([5, 6], {}),
    "bad_words": (["four"], {}),
    "priority": (3, {}),
    # where an output ends, and what it says
    "max_tokens": (3, {}),
    "max_completion_tokens": (3, {}),
    "min_tokens": (4, {}),
    "ignore_eos": (True, {}),
    "stop": ("a", {}),
    "stop_token_ids": ([66], {}),
    "include_stop_str_in_output": (True, {"stop": "a"}),
    "skip_special_tokens": (False, {"ignore_eos": True}),
    "echo": (True, {"add_generation_prompt": False}),
    "response_format": ({"type": "json_object"}, {}),
    "structured_outputs": ({"regex": "a"}, {}),
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, STREAM),
    "include_usage": (True, STREAM),
    "continuous_usage_stats": (True, OPTIONS),
    # what is told besides
    "logprobs": (True, {}),
    "top_logprobs": (1, {"logprobs": True}),
    "prompt_logprobs": (1, {}),
    "return_token_ids": (True, {}),
    "return_tokens_as_token_ids": (True, SCORED),
    "return_token_strs": (True, {}),
    # how a prompt is made
    "add_special_tokens": (False, {}),
    "truncate_prompt_tokens": (2, {}),
    "truncation_side": ("right", {"truncate_prompt_tokens": 2}),
    "add_generation_prompt": (False, {}),
    "continue_final_message": (True, {}),
    "reasoning_effort": ("low", {}),
    "chat_template_kwargs": ({"mood": "good"}, {}),
}
"""Field -> a value that is not its default, and what must be given with it to count; by path where paths differ."""
OTHER_VALUES = {("/v1/completions", "logprobs"): 1, ("/v1/chat/completions", "add_special_tokens"): True}
OTHER_VALUES |= {("/tokenize", "model"): "other", ("/detokenize", "model"): "other"}
OTHER_VALUES |= {("/tokenize", "add_special_tokens"): True, ("/detokenize", "skip_special_tokens"): True}


class Tokenizer:
    """The checkpoint's, with a template that reads all that it can, and a special token in front."""

    chat_template = (
        "{% for m in messages %}[{{ m.role }} {{ m.content }}{% endfor %}{{ 'A:' if add_generation_prompt }}"
        "{{ reasoning_effort }}{{ mood }}"
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(tokenizer(), name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [*([1] if add_special_tokens else []), *tokenizer().encode(text)]


def seen(path: str, body: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a body leads to: the status, what the engine got, and the answer without what differs each time."""
    engine = FakeEngine(reply=lambda request: [65, 0, 66, 0, 67, 68])
    app = app_of(engine, names=("tiny", "alias"))
    app.state.service.tokenizer = Tokenizer()
    response = post(app, path, body)
    got = [(list(each.token_ids), each.params, each.priority) for each in engine.requests]
    text = response.text
    for request in engine.requests[:1]:
        text = re.sub(r'"created":\d+', "", text.replace(request.group, ""))
    return response.status_code, got, text


def changes(path: str, name: str, value: Any, beside: Mapping[str, Any]) -> bool:
    """Whether a field with this value leads to anything else than a body without it."""
    body = {**BODIES[path][1], **beside.get(path, beside)}
    inner = {"stream_options": {**body.get("stream_options", {}), name: value}}
    given = inner if name in StreamOptions.model_fields else {name: value}
    return seen(path, body) != seen(path, {**body, **given})


def without_a_case(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields) - CASES.keys()


@pytest.mark.parametrize(("path", "name"), [*EACH, *((EACH[0][0], name) for name in StreamOptions.model_fields)])
def test_every_field_changes_something(path: str, name: str) -> None:
    value, beside = CASES[name]
    assert changes(path, name, OTHER_VALUES.get((path, name), value), beside), f"{name} of {path} changes nothing"


def test_a_field_that_nothing_acts_on_is_found() -> None:
    class WithWish(CompletionRequest):
        wish: int | None = None

    for model in (*(model for model, _ in BODIES.values()), StreamOptions):
        assert not without_a_case(model)
    assert without_a_case(WithWish) == {"wish"}
    assert not changes("/v1/completions", "wish", 5, {})
