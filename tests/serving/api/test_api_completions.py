"""Answers over a fake engine, whole and streamed: what both kinds promise, then what only completions have."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from api_clients import ASKS, CHAT, COMPLETIONS, MODEL, app_of, chat, complete, post, says, stream, token_ids, tokenizer
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import KVCacheExhausted
from model_runner import FinishReason, RequestError
from serving.api.completions import _pieces
from serving.generation_config import checkpoint_defaults
from serving.requests import EngineDead, RequestInput, RequestOutput
from ubatch import ConfigError

pytestmark = pytest.mark.long

PATH = COMPLETIONS


def said(choice: dict[str, Any]) -> str:
    """The text of a choice of either kind, or of a part of one."""
    told: dict[str, Any] = choice.get("message") or choice.get("delta") or {"content": choice.get("text", "")}
    return str(told.get("content", ""))


# -- both kinds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [PATH, CHAT])
@given(
    text=st.text(alphabet="ab é🎉", max_size=12),
    stop=st.lists(st.text(alphabet="ab é", min_size=1, max_size=4), max_size=2),
    per_step=st.integers(1, 3),
    logprobs=st.booleans(),
    echo=st.booleans(),
    min_tokens=st.integers(0, 6),
)
@settings(max_examples=20)
def test_streamed_is_what_is_not_streamed(
    path: str, text: str, stop: list[str], per_step: int, logprobs: bool, echo: bool, min_tokens: int
) -> None:
    engine = FakeEngine(reply=says(text), tokens_per_step=per_step)
    asked: dict[str, Any] = {"logprobs": 1} if path == PATH else {"logprobs": True, "top_logprobs": 1}
    body = {**ASKS[path], "stop": stop, "max_tokens": 100, "min_tokens": min_tokens, "n": 2, "echo": echo}
    body |= asked if logprobs else {}
    whole = (complete if path == PATH else chat)(engine, body)
    engine.requests.clear()
    events = stream(engine, path, {**body, "stream_options": {"include_usage": True}})
    assert len({event["id"] for event in events}) == 1
    for index, choice in enumerate(whole["choices"]):
        parts = [part for event in events for part in event["choices"] if part["index"] == index]
        assert "".join(map(said, parts)) == said(choice)
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        told = [part["logprobs"] for part in parts if part["logprobs"]]
        for name, values in (choice["logprobs"] or {}).items():
            assert values is None or [entry for each in told for entry in each[name]] == values
        if path == CHAT:
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            assert not any("role" in part["delta"] for part in parts[1:])
    assert events[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (KVCacheExhausted("more blocks than there are"), 400, "context_length_exceeded"),
        (RequestError("no"), 400, None),
        (EngineDead("rank 1: killed"), 500, "engine_dead"),
        (FinishReason.ABORT, 500, "aborted"),
        (FinishReason.ERROR, 500, "not_finite"),
        (FinishReason.NO_TOKEN_LEFT, 400, "no_token_left"),
        (FinishReason.GRAMMAR, 400, "grammar"),
        (ZeroDivisionError("a secret"), 500, None),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", [PATH, CHAT])
def test_failures(path: str, failure: Exception | FinishReason, status: int, code: str | None, n: int) -> None:
    """Before anything was sent an ordinary response, streamed or not; later an event in the stream."""
    for body in ({"n": n}, {"n": n, "stream": True}):
        engine = FakeEngine(fail_after=0, failure=failure)
        response = post(engine, path, {**ASKS[path], **body})
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert "secret" not in response.text
        assert response.json()["error"]["type"] == ("server_error" if status == 500 else "invalid_request_error")
        assert not engine.alive
    engine = FakeEngine(fail_after=2, failure=failure)
    *events, last = stream(engine, path, {"n": n})
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * len(events)
    assert len(events) >= 2
    assert last["error"]["code"] == code
    assert not engine.alive


@pytest.mark.parametrize("path", [PATH, CHAT])
@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_gives_nothing(path: str, stream: bool) -> None:
    response = post(FakeEngine(reply=lambda request: []), path, {**ASKS[path], "stream": stream})
    assert response.status_code == 500
    assert "without a finish reason" in response.json()["error"]["message"]


# -- completions -------------------------------------------------------------------------------------------------------


def test_a_completion() -> None:
    engine = FakeEngine(reply=says("a reply"), num_cached_tokens=2)
    answer = complete(engine, {})
    [choice] = answer["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "a reply", "stop")
    prompt, output = len(tokenizer().encode("Hello")), len(tokenizer().encode("a reply")) + 1
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "reasoning_tokens": 0,
        },
    }
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    assert answer["id"].startswith("cmpl-")
    assert not engine.aborted


def test_all_requests_of_a_body_take_turns_as_one() -> None:
    engine = FakeEngine()
    bodies = []
    for _ in range(2):
        begun = len(engine.requests)
        answer = complete(engine, {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 1})
        groups = {request.group for request in engine.requests[begun:]}
        assert len(engine.requests) - begun == 6
        assert groups == {answer["id"]}
        bodies += groups
    assert len(set(bodies)) == 2


def test_a_turn_is_bounded_by_length_too() -> None:
    assert list(_pieces([])) == []
    assert list(_pieces([3] * 40)) == [(0, 16), (16, 32), (32, 40)]
    assert list(_pieces([60_000, 60_000, 10, 10, 500_000, 1])) == [(0, 1), (1, 4), (4, 5), (5, 6)]
    assert list(_pieces([50_000, 50_000, 1])) == [(0, 2), (2, 3)]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", [[65]]), (["a", "b"], [[65], [66]]), ([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [7]], [[5, 6], [7]])],
)
def test_prompts(prompt: Any, expected: list[list[int]]) -> None:
    engine = FakeEngine()
    answer = complete(engine, {"prompt": prompt, "n": 2, "max_tokens": 3})
    prompts = sorted(engine.requests, key=lambda request: int(request.request_id.rpartition("-")[2]))
    assert [token_ids(request) for request in prompts] == [ids for ids in expected for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert answer["usage"]["completion_tokens"] == 3 * 2 * len(expected)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(map(len, expected[1:]))
    assert not engine.alive


def test_every_field_reaches_the_engine() -> None:
    engine = FakeEngine()
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": -1,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.2,
        "max_tokens": 9,
        "min_tokens": 3,
        "ignore_eos": True,
        "logprobs": 4,
    }
    body = {**fields, "logit_bias": {"5": -2, "6": 3.5}, "stop_token_ids": [8], "seed": 40, "n": 2, "priority": -3}
    complete(engine, body)
    first, second = engine.requests
    assert {name: getattr(first.params, name) for name in fields} == fields
    assert first.params.logit_bias == ((5, -2), (6, 3.5))
    assert first.params.stop_token_ids == (8,)
    assert (first.params.seed, second.params.seed, first.priority) == (40, 41, -3)


def test_defaults_are_openais_or_the_checkpoints() -> None:
    engine = FakeEngine()
    complete(engine, {})
    complete(app_of(engine, defaults={"temperature": 0.6, "top_k": 20}), {"top_k": None, "unknown": {"a": 1}})
    complete(app_of(engine, defaults={"temperature": 0.6, "top_k": 20}), {"temperature": 0.0, "top_k": 0})
    params = [
        (request.params.temperature, request.params.top_k, request.params.max_tokens) for request in engine.requests
    ]
    assert params == [(1.0, 0, 16), (0.6, 20, 16), (0.0, 0, 16)]


def test_defaults_of_a_checkpoint(tmp_path: Any) -> None:
    assert checkpoint_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.7, "top_p": null, "do_sample": true, "eos_token_id": 0}')
    assert checkpoint_defaults(tmp_path) == {"temperature": 0.7}
    file.write_text('{"max_new_tokens": 40, "max_length": 20}')
    assert checkpoint_defaults(tmp_path) == {"max_tokens": 40}
    wrong = {
        '{"max_new_tokens": 0}': r"cannot be used: max_new_tokens must be at least 1, not 0",
        '{"max_new_tokens": "5"}': r"cannot be used: max_new_tokens must be an integer",
        '{"top_p": 3}': r"cannot be used: top_p",
        '{"top_k": "many"}': r"cannot be used: top_k",
        "{": r"is not valid JSON",
        "[]": r"must hold one JSON object",
        "[" * 100_000: r"is not valid JSON",
    }
    for text, message in wrong.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=rf"generation_config\.json {message}"):
            checkpoint_defaults(tmp_path)


@pytest.mark.parametrize(("most", "lengths"), [(40, (40, 4, 40)), (5, (5, 4, 5)), (5000, (1023, 4, 1020))])
def test_the_default_length_of_a_checkpoint(most: int, lengths: tuple[int, ...]) -> None:
    """`max_new_tokens` of its generation config, as far as the context allows; what a request asks for is above it."""
    engine = FakeEngine()
    app = app_of(engine, defaults={"max_tokens": most})
    complete(app, {"prompt": [5]})
    complete(app, {"prompt": [5] * 1020})
    chat(app, {})
    assert tuple(request.params.max_tokens for request in engine.requests) == lengths
    complete(app, {"prompt": [5], "max_tokens": 60})
    chat(app, {"max_completion_tokens": 60})
    assert [request.params.max_tokens for request in engine.requests[3:]] == [60, 60]


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one two")])
@pytest.mark.parametrize("per_step", [2, 8])
def test_stop_strings_take_the_request_back(include: bool, text: str, per_step: int) -> None:
    engine = FakeEngine(reply=says("one two three and four and five and six"), tokens_per_step=per_step)
    body = {"stop": ["three", "two"], "include_stop_str_in_output": include, "logprobs": 0}
    answer = complete(engine, body)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert "".join(choice["logprobs"]["tokens"]) == "one two"
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"]
    assert engine.aborted
    assert not engine.alive
    events = stream(engine, PATH, body)
    assert "".join(said(choice) for event in events for choice in event["choices"]) == text


def test_log_probabilities() -> None:
    [choice] = complete(FakeEngine(reply=says("a🎉b")), {"logprobs": 2})["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 1, 1, 1, 2, 3],
        "token_logprobs": [-1.5] * 7,
        "tokens": ["a", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x8e", r"bytes:\x89", "b", "<|endoftext|>"],
        "top_logprobs": [
            {"b": -1.0, "a": -1.5},
            *({rf"bytes:\x{byte + 1:02x}": -1.0, rf"bytes:\x{byte:02x}": -1.5} for byte in "🎉".encode()),
            {"c": -1.0, "b": -1.5},
            {"!": -1.0, "<|endoftext|>": -1.5},
        ],
    }


def test_the_chosen_token_is_among_the_top() -> None:
    [choice] = complete(FakeEngine(reply=says("a")), {"logprobs": 0, "max_tokens": 1})["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -1.5}]


def test_echo() -> None:
    body = {"prompt": "é!", "echo": True, "max_tokens": 1}
    assert complete(FakeEngine(reply=says("a")), body)["choices"][0]["text"] == "é!a"
    assert complete(FakeEngine(reply=says("a")), {**body, "prompt": [65, 66]})["choices"][0]["text"] == "aba"
    [choice] = complete(FakeEngine(reply=says("a")), {**body, "logprobs": 1})["choices"]
    assert choice["text"] == "é!a"
    assert choice["logprobs"]["tokens"] == [r"bytes:\xc3", r"bytes:\xa9", "!", "a"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.5, -1.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    incomplete = tokenizer().encode("é")[:1]
    [choice] = complete(FakeEngine(reply=says("ab")), {"prompt": incomplete, "echo": True, "logprobs": 0})["choices"]
    assert choice["text"] == "\ufffdab"
    assert choice["logprobs"]["text_offset"] == [0, 1, 3]


def test_echo_alone_scores_the_prompt() -> None:
    answer = complete(FakeEngine(reply=says("a")), {"prompt": "bc", "echo": True, "max_tokens": 0, "logprobs": 0})
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("bc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5]
    assert answer["usage"]["completion_tokens"] == 0


def test_what_a_stop_string_ended_before_the_fault_is_whole() -> None:
    """A slow reader gets both at once."""

    class Merging(FakeEngine):
        async def _steps(self, request: RequestInput) -> AsyncGenerator[RequestOutput, None]:
            parts = [part async for part in super()._steps(request)]
            yield replace(parts[0], token_ids=[*parts[0].token_ids], finish_reason=FinishReason.ERROR)

    for stop, status in ((["two"], 200), (["never"], 500)):
        engine = Merging(reply=says("one two three"), tokens_per_step=100)
        response = post(engine, PATH, {"prompt": "a", "max_tokens": 100, "stop": stop})
        assert response.status_code == status
        if status == 200:
            (choice,) = response.json()["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
