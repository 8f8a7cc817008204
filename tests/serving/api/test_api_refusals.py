"""What is refused with 400, before anything runs: by the field's name, in one message, in OpenAI's form."""

from typing import Any

import pytest
from api_clients import ASKS, CHAT, COMPLETIONS, post, refused
from fake_engine import FakeEngine

from serving.api.sampling import MAX_ALLOWED_OF_ALL

pytestmark = pytest.mark.long

TOKENIZE = "/tokenize"
HALF = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So, "}]
BOTH_ENDS = {"messages": HALF, "continue_final_message": True, "add_generation_prompt": True}
BODIES = {**ASKS, TOKENIZE: {}}

Rows = list[tuple[dict[str, Any], str | None, str]]
WRONG: dict[str, tuple[Any, ...]] = {
    "temperature": (2.1, "2.1", "hot", "nan", "", True),
    "top_p": (0,),
    "top_k": (-2,),
    "min_p": (1.1,),
    "presence_penalty": (3,),
    "n": (0, "0", "2.5", True, "true"),
    "min_tokens": ("0" * 101,),
    "seed": (2**63, str(2**63)),
    "priority": (-(2**63) - 1,),
    "stream": ("maybe", 2, 0.5, ""),
    "stream_options": ({"include_usage": True},),
    "prompt_logprobs": (-1, 21),
    "truncate_prompt_tokens": (0, -2, 1.5, "-2", True),
    "logit_bias": (*({"x": 1}, {"9999": 1}, {"0" * 5000: 1}), {"0" * zeros + "5": 1 for zeros in range(1025)}),
    "stop_token_ids": ([9999],),
    "stop": ([""], 5, "a" * 1001, ["a"] * 65),
    # what would change the answer, unless its value asks for nothing
    "thinking_token_budget": (0,),
    "use_beam_search": (0,),
    "guided_json": ({},),
    "max_new_tokens": (0,),
    "suffix": ("end",),
    "tools": ([{"type": "function", "function": {"name": "f"}}] * 2,),
    "tool_choice": ("required",),
}
"""Field -> values that are refused by its name."""
GENERATING: Rows = [
    *(({name: value}, name, "") for name, values in WRONG.items() for value in values),
    ({"best_of": 3, "n": 2}, "best_of", ""),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", ""),
    ({"logit_bias": {"5": 200}}, None, ""),
    ({"logit_bias": {str(n): 0 for n in range(1025)}}, "logit_bias", ": Dictionary should have at most 1024 items"),
    ({"stop_token_ids": [5] * 129}, "stop_token_ids", "should have at most 128 items after validation, not 129."),
    ({"length_penalty": True}, "length_penalty", "length_penalty is not supported: "),
    ({"guided_regex": "x" * 10_000}, "guided_regex", "it is 'xxx"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "should not be empty"),
    ({"allowed_token_ids": [2048]}, "allowed_token_ids", "2048 is not a token id from 0 to 2047"),
    ({"allowed_token_ids": [3, -1]}, "allowed_token_ids.1", "greater than or equal to 0"),
    *(({"allowed_token_ids": [wrong]}, "allowed_token_ids.0", "integer") for wrong in (1.5, "x", True, None)),
    ({"allowed_token_ids": ["1", True]}, "allowed_token_ids.0", "integer"),
    ({"allowed_token_ids": 3}, "allowed_token_ids", "list"),
    ({"allowed_token_ids": [1] * (MAX_ALLOWED_OF_ALL + 1)}, "allowed_token_ids", "1048577 ids; at most 1048576"),
    ({"allowed_token_ids": [1, 2], "stop_token_ids": [1, 2], "min_tokens": 1}, "allowed_token_ids", "no token"),
    (
        {"allowed_token_ids": [274], "bad_words": ["self"]},
        "allowed_token_ids",
        "(274,) leaves no token: each is a bad one.",
    ),
    ({"bad_words": "self"}, "bad_words", "list"),
    ({"bad_words": ["x", 3]}, "bad_words.1", "bad_words.1: Input should be a valid string, not 3."),
    ({"bad_words": [""]}, "bad_words.0", "at least 1 character"),
    ({"bad_words": ["  "]}, "bad_words", "only white space"),
    ({"bad_words": ["a" * 201]}, "bad_words.0", "at most 200 characters"),
    ({"bad_words": ["a"] * 129}, "bad_words", "List should have at most 128 items after validation, not 129."),
    ({"bad_words": ["äöü" * 60 + str(n) for n in range(50)]}, "bad_words", "tokens in all, with a space before each"),
]
OWN_WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    COMPLETIONS: {
        "prompt": (None, [], ["a", 5], [[]], "", [-1], [2048], [5.5]),
        "logprobs": (21,),
        "max_tokens": (0, -1),
        "min_tokens": (17,),
    },
    CHAT: {
        "messages": ([], None),
        "chat_template_kwargs": ({"chat_template": "x"},),
        "reasoning_effort": ("enormous",),
        "top_logprobs": (2,),
        "logprobs": (5,),
        "max_tokens": (0,),
        "max_completion_tokens": (1.5,),
    },
}
OWN: dict[str, Rows] = {
    COMPLETIONS: [
        (
            {"allowed_token_ids": [*range(2048), 3], "n": 128, "prompt": ["a"] * 5},
            "allowed_token_ids",
            "2048 different ids for each of 640 outputs",
        )
    ],
    CHAT: [
        ({"messages": [{"content": "a"}]}, "messages.0.role", ""),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", ""),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", ""),
        *(
            ({"chat_template_kwargs": {name: 1}}, "chat_template_kwargs", f"asks for, not {name}.")
            for name in ("messages", "self", "tokenize")
        ),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", ""),
        (BOTH_ENDS, "continue_final_message", ""),
    ],
    TOKENIZE: [(BOTH_ENDS, "continue_final_message", ""), ({}, "prompt", "Give either prompt or messages.")],
}
EACH = [
    *((path, *row) for path in (COMPLETIONS, CHAT) for row in GENERATING),
    *((path, {name: value}, name, "") for path, own in OWN_WRONG.items() for name in own for value in own[name]),
    *((path, *row) for path, rows in OWN.items() for row in rows),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), EACH)
def test_wrong_values_are_400(path: str, body: dict[str, Any], param: str | None, message: str) -> None:
    error = refused(FakeEngine(), path, {**BODIES[path], **body})
    assert sorted(error) == ["code", "message", "param", "request_id", "type"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, None)
    assert error["message"]
    assert message in error["message"]
    assert error["message"].count(", not ") <= 1, "it says once what is wrong"
    assert len(error["message"]) < 400
    assert "bad_token" not in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("length_penalty", 1),
        ("length_penalty", 1.0),
        ("thinking_token_budget", -1),
        ("response_format", {"type": "text", "json_schema": None}),
        ("structured_outputs", {"json": None}),
    ],
)
def test_values_that_ask_for_nothing_are_taken(path: str, name: str, value: Any) -> None:
    assert post(FakeEngine(), path, {**BODIES[path], name: value}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (COMPLETIONS, {"prompt": [5] * 1024}, "prompt", "1024"),
        (COMPLETIONS, {"prompt": [5] * 1000, "max_tokens": 25}, "prompt", "1024"),
        (COMPLETIONS, {"max_tokens": 1024, "truncate_prompt_tokens": -1}, "max_tokens", "1024 of the output alone"),
        (CHAT, {"messages": [{"role": "user", "content": "a b c d " * 1000}]}, "messages", ""),
        *(
            (path, {**long, name: asked}, name, "")
            for path, name, long in (
                (COMPLETIONS, "max_tokens", {"prompt": [5] * 10}),
                (CHAT, "max_tokens", {"messages": [{"role": "user", "content": "abc " * 10}]}),
                (CHAT, "max_completion_tokens", {"messages": [{"role": "user", "content": "abc " * 10}]}),
            )
            for asked in (1020, 1024, 10**9)  # by its own field, not the prompt's, which is the shorter of the two
        ),
    ],
)
def test_what_does_not_fit(path: str, body: dict[str, Any], param: str, message: str) -> None:
    error = refused(FakeEngine(), path, {**BODIES[path], **body})
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert message in error["message"]
