"""What a prompt can be asked for: cut, continued, echoed, scored, told as token ids."""

from typing import Any

import pytest
from api_clients import CHAT, COMPLETIONS, app_with, chat, complete, post, refused, says, stream, token_ids, tokenizer
from fake_engine import FakeEngine

from serving.api.prompts import COUNTED_CHARACTERS, _names_in
from serving.text.tokenizer import Vocabulary

pytestmark = pytest.mark.long

HALF = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So, "}]


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(0, 3)),
        ({"truncate_prompt_tokens": 3000}, slice(None)),
        ({"truncate_prompt_tokens": -1}, slice(None)),
        ({"truncation_side": "right"}, slice(None)),
    ],
)
def test_a_prompt_is_cut(asked: dict[str, Any], kept: slice) -> None:
    text = "one two three four five six"
    ids = tokenizer().encode(text)
    for prompt in (text, ids, [text, text], [ids]):
        engine = FakeEngine()
        complete(engine, {"prompt": prompt, "max_tokens": 2, **asked})
        assert [token_ids(request) for request in engine.requests] == [ids[kept]] * len(engine.requests)
    engine = FakeEngine()
    chat(engine, {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **asked})
    assert token_ids(engine.requests[0]) == tokenizer().encode(f"{text}\n")[kept]


@pytest.mark.parametrize(("max_tokens", "left"), [(None, 16), (100, 100)])
def test_a_prompt_is_cut_to_what_leaves_room(max_tokens: int | None, left: int) -> None:
    engine = FakeEngine()
    complete(engine, {"prompt": [5] * 3000, "truncate_prompt_tokens": -1, "max_tokens": max_tokens})
    assert len(engine.requests[0].token_ids) == 1024 - left
    assert engine.requests[0].params.max_tokens == left


def test_a_conversation_is_cut_to_what_leaves_room() -> None:
    engine = FakeEngine(reply=says("a"))
    messages = [{"role": "user", "content": "word " * 5000}]
    chat(engine, {"messages": messages, "truncate_prompt_tokens": -1})
    assert len(engine.requests[0].token_ids) == 1023
    chat(engine, {"messages": messages, "truncate_prompt_tokens": -1, "max_completion_tokens": 24})
    assert len(engine.requests[1].token_ids) == 1000


@pytest.mark.parametrize(("path", "param"), [(COMPLETIONS, "prompt"), (CHAT, "messages")])
def test_what_is_still_too_long_is_refused(path: str, param: str) -> None:
    long = "ab " * 3000
    body = {param: long if path == COMPLETIONS else [{"role": "user", "content": long}], "max_tokens": 30}
    assert post(FakeEngine(reply=says("a")), path, {**body, "truncate_prompt_tokens": 994}).status_code == 200
    error = refused(FakeEngine(), path, {**body, "truncate_prompt_tokens": 1000})
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


@pytest.mark.wide
def test_so_much_text_is_tokenized_to_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, for exactly the last tokens; beyond a limit it is refused unread, so that memory stays bounded."""
    assert 1024 * Vocabulary.of(tokenizer()).longest < COUNTED_CHARACTERS
    cut = {"truncate_prompt_tokens": 5, "max_tokens": 1}
    engine = FakeEngine()
    text = "ab " * (COUNTED_CHARACTERS // 3)
    complete(engine, {"prompt": text, **cut})
    assert token_ids(engine.requests[0]) == tokenizer().encode(text[-300:])[-5:]
    assert refused(engine, COMPLETIONS, {"prompt": text + "abcd", **cut})["code"] == "context_length_exceeded"


def test_a_cut_prompt_is_echoed_as_it_was_cut() -> None:
    body = {"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True, "max_tokens": 1, "logprobs": 0}
    [choice] = complete(FakeEngine(reply=says("!")), body)["choices"]
    kept = tokenizer().decode(tokenizer().encode("abcdef")[-2:])
    assert choice["text"] == f"{kept}!"
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.5]


def expected_logprobs(ids: list[int], count: int) -> list[Any]:
    """What the engine of these tests says: the token itself is the second most likely one."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": tokenizer().decode([token])}

    own = [{str(token): entry(token, -1.5, 2)} for token in ids]
    first = [{str(token + 1): entry(token + 1, -1.0, 1)} if count else {} for token in ids]
    return [None, *({**a, **b} for a, b in list(zip(first, own, strict=True))[1:])]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_prompt_is_scored(count: int) -> None:
    ids = tokenizer().encode("Hello")
    body = {"prompt_logprobs": count, "max_tokens": 1, "n": 2}
    choices = complete(FakeEngine(), body)["choices"]
    assert [choice["prompt_logprobs"] for choice in choices] == [expected_logprobs(ids, count)] * 2
    answer = chat(FakeEngine(), body)
    assert answer["prompt_logprobs"] == expected_logprobs(tokenizer().encode("Hello\n"), count)
    assert "prompt_logprobs" not in answer["choices"][0]


def test_scores_of_prompt_and_output_may_differ_in_number() -> None:
    body = {"prompt": [65, 66], "echo": True, "max_tokens": 1}
    size = {0: 1, 1: 2, 2: 2}  # the likeliest and the token itself, which is the second
    for logprobs, of_prompt in ((2, 1), (0, 2), (2, 0)):
        engine = FakeEngine(reply=says("c"))
        [choice] = complete(engine, {**body, "logprobs": logprobs, "prompt_logprobs": of_prompt})["choices"]
        assert engine.requests[0].params.prompt_logprobs == max(logprobs, of_prompt)
        assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [size[logprobs]] * 2
        assert len(choice["prompt_logprobs"][1]) == size[of_prompt]


@pytest.mark.parametrize("per_step", [1, 3])
def test_token_ids_are_told(per_step: int) -> None:
    prompt, output = tokenizer().encode("Hi"), [*tokenizer().encode("Zoë 🎉"), 0]
    body: dict[str, Any] = {"return_token_ids": True, "n": 2, "max_tokens": 50}
    make = {"reply": says("Zoë 🎉"), "tokens_per_step": per_step}
    for choice in complete(FakeEngine(**make), {**body, "prompt": "Hi"})["choices"]:
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, output)
    events = stream(FakeEngine(**make), COMPLETIONS, {**body, "prompt": "Hi"})
    for index in range(2):
        parts = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert [part.get("prompt_token_ids") for part in parts] == [prompt] + [None] * (len(parts) - 1)
        assert [token for part in parts for token in part["token_ids"]] == output
    messages = {"messages": [{"role": "user", "content": "Hi"}]}
    answer = chat(FakeEngine(**make), {**body, **messages})
    of_chat = tokenizer().encode("Hi\n")
    assert answer["prompt_token_ids"] == of_chat
    assert [choice["token_ids"] for choice in answer["choices"]] == [output] * 2
    events = stream(FakeEngine(**make), CHAT, {**body, **messages})
    assert [event.get("prompt_token_ids") for event in events] == [of_chat] + [None] * (len(events) - 1)
    for index in range(2):
        parts = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert [token for part in parts for token in part.get("token_ids", [])] == output


def test_token_ids_end_with_the_stop_string() -> None:
    body = {"stop": "two", "return_token_ids": True, "max_tokens": 50}
    answer = complete(FakeEngine(reply=says("one two three"), tokens_per_step=50), body)
    ids = answer["choices"][0]["token_ids"]
    assert tokenizer().decode(ids) == "one two"
    assert len(ids) == answer["usage"]["completion_tokens"]


def test_tokens_are_named_by_their_ids() -> None:
    body = {"return_tokens_as_token_ids": True, "max_tokens": 1}
    token = tokenizer().encode("a")[0]
    [choice] = complete(FakeEngine(reply=says("a")), {**body, "logprobs": 1})["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}"]
    assert choice["logprobs"]["top_logprobs"] == [{f"token_id:{token}": -1.5, f"token_id:{token + 1}": -1.0}]
    [choice] = chat(FakeEngine(reply=says("a")), {**body, "logprobs": True, "top_logprobs": 1})["choices"]
    [entry] = choice["logprobs"]["content"]
    assert (entry["token"], entry["top_logprobs"][0]["token"]) == (f"token_id:{token}", f"token_id:{token}")


def test_the_last_message_is_continued() -> None:
    engine = FakeEngine(reply=says("fine."))
    answer = chat(engine, {"messages": HALF, "continue_final_message": True})
    assert tokenizer().decode(token_ids(engine.requests[0])) == "Hi\nSo, "
    assert answer["choices"][0]["message"]["content"] == "fine."
    told = post(engine, "/tokenize", {"messages": HALF, "continue_final_message": True}).json()["tokens"]
    assert told == token_ids(engine.requests[0])


@pytest.mark.parametrize(
    ("messages", "asked", "role", "text"),
    [
        (HALF, {}, "assistant", "So, fine."),
        (HALF[:1], {}, "assistant", "fine."),
        (HALF[:1], {"add_generation_prompt": False}, "user", "Hifine."),
        (HALF[:1], {"continue_final_message": True}, "user", "Hifine."),
        ([{"role": "assistant", "content": None}], {}, "assistant", "fine."),
    ],
)
def test_echo_in_chat(messages: list[dict[str, Any]], asked: dict[str, Any], role: str, text: str) -> None:
    body = {"messages": messages, "echo": True, "n": 2, **asked}
    for choice in chat(FakeEngine(reply=says("fine.")), body)["choices"]:
        assert (choice["message"]["role"], choice["message"]["content"]) == (role, text)
    events = stream(FakeEngine(reply=says("fine.")), CHAT, body)
    for index in range(2):
        deltas = [part["delta"] for event in events for part in event["choices"] if part["index"] == index]
        assert "".join(delta.get("content", "") for delta in deltas) == text
        assert [delta["role"] for delta in deltas if "role" in delta] == [role]


def test_names_of_a_template_are_those_of_its_code() -> None:
    template = "wish {# hope #}{% generation %}{{ m['mood'] }}{{ 'be kind' }}{{ thinking }}{% endgeneration %}"
    assert {"m", "mood", "thinking"} <= _names_in(template)
    assert not {"wish", "hope", "be", "kind"} & _names_in(template)


@pytest.mark.parametrize("trimmed", [False, True])
def test_the_echo_is_what_the_prompt_has(trimmed: bool) -> None:
    template = "{% for m in messages %}[{{ m.content" + (" | trim" if trimmed else "") + " }}{% endfor %}"
    app = app_with(template, FakeEngine(reply=says("fine.")))
    answer = chat(app, {"messages": HALF, "continue_final_message": True, "echo": True})
    assert answer["choices"][0]["message"]["content"] == ("So,fine." if trimmed else "So, fine.")


def test_reasoning_effort_goes_to_the_template() -> None:
    for asked, text in (
        ({"reasoning_effort": "low"}, "low True"),
        ({"reasoning_effort": "none"}, "none False"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "high False"),
    ):
        engine = FakeEngine()
        chat(app_with("{{ reasoning_effort }} {{ enable_thinking }}", engine), {"max_tokens": 1, **asked})
        assert tokenizer().decode(token_ids(engine.requests[0])) == text


@pytest.mark.parametrize("number", [5, 5.0])
def test_an_integer_is_one_however_it_is_written(number: float) -> None:
    engine = FakeEngine()
    complete(engine, {"prompt": [number], "max_tokens": number, "seed": 5.0})
    assert (token_ids(engine.requests[0]), engine.requests[0].params.max_tokens) == ([5], 5)
    assert post(engine, COMPLETIONS, {"prompt": [5.5]}).status_code == 400
