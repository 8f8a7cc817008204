"""What answers have besides their text, as clients of vLLM and SGLang look it up: names, nulls, and orders."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from api_clients import ASKS, CHAT, COMPLETIONS, app_of, call, chat, complete, says, stream, tokenizer
from fake_engine import EOS, FakeEngine

from serving.api.answer import NEVER_FILLED

# All fields of vLLM's whole answers, null or not; and SGLang's `matched_stop`.
CHOICE = {"index", "logprobs", "finish_reason", "stop_reason", "matched_stop", "token_ids", "routed_experts"}
SCORED = {"prompt_token_ids", "prompt_logprobs"}
OF_BOTH = {"id", "object", "created", "model", "choices", "usage", *NEVER_FILLED}
OF_COMPLETION, OF_CHAT = OF_BOTH, {*OF_BOTH, *SCORED, "prompt_text"}
NOTHING = ("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning", "reasoning_content")
CARD = {"id", "object", "created", "owned_by", "root", "parent", "permission", "max_model_len"}
ASKED = {COMPLETIONS: {"logprobs": 1}, CHAT: {"logprobs": True, "top_logprobs": 2}}
PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


def answered(path: str, engine: FakeEngine, body: Mapping[str, Any]) -> Any:
    """The whole answer of either kind."""
    return (complete if path == COMPLETIONS else chat)(engine, {**ASKS[path], **body})


def test_what_is_not_told_is_null() -> None:
    answer = answered(COMPLETIONS, FakeEngine(), {})
    [choice] = answer["choices"]
    assert (set(answer), set(choice)) == (OF_COMPLETION, {*CHOICE, *SCORED, "text"})
    assert [choice[name] for name in (*SCORED, "token_ids", "routed_experts", "logprobs")] == [None] * 5
    answer = answered(CHAT, FakeEngine(), {"max_tokens": 1})
    [choice] = answer["choices"]
    assert (set(answer), set(choice), set(choice["message"])) == (
        OF_CHAT,
        {*CHOICE, "message"},
        {"role", "content", *NOTHING},
    )
    assert [choice["message"][name] for name in NOTHING] == [None] * 7
    assert [answer[name] for name in (*NEVER_FILLED, *SCORED, "prompt_text")] == [None] * 8


def test_a_model_card_names_the_checkpoint() -> None:
    app = app_of(FakeEngine(), root="folder/of/it")
    [card] = call(app, "GET", "/v1/models").json()["data"]
    assert set(card) == CARD
    assert (card["root"], card["parent"], card["permission"]) == ("folder/of/it", None, [])


# -- why an output ended -----------------------------------------------------------------------------------------------

A, B, C = (tokenizer().encode(letter)[0] for letter in "abc")
ENDS: Mapping[str, tuple[dict[str, Any], str, str | int | None, str | int | None]] = {
    "a stop string": ({"stop": ["x", "b"]}, "stop", "b", "b"),
    "a stop token": ({"stop_token_ids": [B]}, "stop", B, B),
    "the end of sequence": ({}, "stop", None, EOS),
    "the end of sequence, asked for as well": ({"stop_token_ids": [EOS]}, "stop", None, EOS),
    "the end of sequence, only asked for": ({"stop_token_ids": [EOS], "ignore_eos": True}, "stop", EOS, EOS),
    "the length": ({"max_tokens": 1}, "length", None, None),
    "a stop string before a stop token": ({"stop": "ab", "stop_token_ids": [B]}, "stop", "ab", "ab"),
}


@PATHS
@pytest.mark.parametrize("why", ENDS)
@pytest.mark.parametrize("per_step", [1, 5])
def test_why_an_output_ended(path: str, why: str, per_step: int) -> None:
    """The stop string or token; in vLLM's field none for the tokenizer's own end of sequence."""
    asked, *expected = ENDS[why]
    body = {**ASKS[path], "max_tokens": 9, "include_stop_str_in_output": True, **asked}
    names, engine = (
        ("finish_reason", "stop_reason", "matched_stop"),
        FakeEngine(lambda request: [A, B, C, EOS], per_step),
    )
    [choice] = answered(path, engine, body)["choices"]
    assert [choice[name] for name in names] == expected
    *parts, last = [event["choices"][0] for event in stream(engine, path, body)]
    assert [[part[name] for name in names] for part in parts] == [[None] * 3] * len(parts)
    assert [last[name] for name in names] == expected


# -- orders ------------------------------------------------------------------------------------------------------------


@PATHS
@pytest.mark.parametrize("streamed", [False, True])
def test_the_chosen_token_is_first_and_then_the_most_likely(path: str, streamed: bool) -> None:
    """The fake engine's token is always the second most likely one, after its successor."""
    engine, body = FakeEngine(says("a")), {**ASKED[path], "max_tokens": 1}
    choices = answered(path, engine, body)["choices"]
    if streamed:
        choices = [event["choices"][0] for event in stream(engine, path, body)]
    [logprobs] = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    if path == COMPLETIONS:
        assert [list(top.items()) for top in logprobs["top_logprobs"]] == [[("a", -1.5), ("b", -1.0)]]
    else:
        assert [top["token"] for top in logprobs["content"][0]["top_logprobs"]] == ["a", "b"]


@PATHS
def test_the_prompts_token_is_first_and_then_the_most_likely(path: str) -> None:
    asks = {COMPLETIONS: {"prompt": [A, B]}, CHAT: {}}[path]
    answer = answered(path, FakeEngine(), {**asks, "max_tokens": 1, "prompt_logprobs": 3, "return_token_ids": True})
    of_prompt = answer["choices"][0] if path == COMPLETIONS else answer
    own = of_prompt["prompt_token_ids"][1]
    told = [(int(token), entry["rank"]) for token, entry in of_prompt["prompt_logprobs"][1].items()]
    assert told == [(own, 2), (own + 1, 1), (own + 2, 3)]


def test_as_many_as_asked_for_in_a_chat() -> None:
    """With one, only the chosen token itself, as in vLLM."""
    engine = FakeEngine(says("a"))
    for count, names in ((0, []), (1, ["a"]), (3, ["a", "b", "c"])):
        [choice] = answered(CHAT, engine, {"logprobs": True, "top_logprobs": count, "max_tokens": 1})["choices"]
        assert [top["token"] for top in choice["logprobs"]["content"][0]["top_logprobs"]] == names


# -- usage, echo -------------------------------------------------------------------------------------------------------


@PATHS
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("per_step", [1, 2])
def test_usage_of_an_event_counts_what_its_choice_has_told(path: str, echo: bool, per_step: int) -> None:
    """None with the role; and of each choice alone, but for the last event."""
    body: dict[str, Any] = {"n": 2, "max_tokens": 4, "echo": echo, "return_token_ids": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if path == CHAT:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        body |= {"messages": messages, "continue_final_message": True}
    *events, last = stream(FakeEngine(tokens_per_step=per_step), path, body)
    for index in range(2):
        told = 0
        for event in (event for event in events if event["choices"][0]["index"] == index):
            told += len(event["choices"][0].get("token_ids", ()))
            assert event["usage"]["completion_tokens"] == told
            assert event["usage"]["total_tokens"] == told + event["usage"]["prompt_tokens"]
        assert told == 4
    assert (last["usage"]["completion_tokens"], last["choices"]) == (8, [])
    if path == CHAT:
        roles = [event for event in events if "role" in event["choices"][0]["delta"]]
        assert [event["usage"]["completion_tokens"] for event in roles] == [0, 0]


def between(choice: Mapping[str, Any], offsets: Sequence[int]) -> list[str]:
    """The texts between offsets of a choice's text."""
    text = choice["text"]
    return [text[begin:end] for begin, end in zip(offsets, [*offsets[1:], len(text)], strict=True)]


@pytest.mark.parametrize("skip", [None, True, False])
def test_the_echo_of_token_ids_has_their_special_tokens(skip: bool | None) -> None:
    body = {"prompt": [EOS, A, EOS, B], "echo": True, "max_tokens": 1, "skip_special_tokens": skip}
    assert complete(FakeEngine(says("a")), body)["choices"][0]["text"] == "<|endoftext|>a<|endoftext|>ba"
    [choice] = complete(FakeEngine(says("a")), {**body, "logprobs": 0})["choices"]
    assert between(choice, choice["logprobs"]["text_offset"]) == choice["logprobs"]["tokens"]


def test_the_echo_of_a_text_is_that_text() -> None:
    body = {"prompt": "a<|endoftext|>b", "echo": True, "max_tokens": 1}
    assert complete(FakeEngine(says("a")), body)["choices"][0]["text"] == "a<|endoftext|>ba"
