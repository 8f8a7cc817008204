"""What a request allows and forbids, from its body to the engine; and stop strings that wait for `min_tokens`."""

from typing import Any

import numpy as np
import pytest
from api_clients import CHAT, COMPLETIONS, complete, post, refused, tokenizer
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from model_runner import RequestError, TokenIds
from serving.api.service import SHORT_BYTES
from serving.text.words import bad_token_sequences

pytestmark = pytest.mark.long

ASKS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": ["a", "b"]},
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
}


def spelled(word: str) -> list[tuple[int, ...]]:
    return [tuple(tokenizer().encode(prefix + word, add_special_tokens=False)) for prefix in ("", " ")]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("padding", [0, SHORT_BYTES], ids=["short", "long"])
def test_both_reach_the_engine(path: str, padding: int) -> None:
    engine = FakeEngine()
    limits = {"allowed_token_ids": [7, 5, 7], "bad_words": ["import os", "  self", "self", "ä"]}
    body = {**ASKS[path], **limits, "n": 2, "max_tokens": 2, "user": "u" * padding}
    assert post(engine, path, body).status_code == 200
    assert len(engine.requests) == (4 if path == COMPLETIONS else 2)
    wanted = [*spelled("import os"), *spelled("self"), spelled("ä")[0]]
    assert spelled("ä")[1][1:] == wanted[-1], "which ends in the other"
    for request in engine.requests:
        assert request.params.allowed_token_ids == (7, 5)
        assert request.params.bad_token_sequences == tuple(dict.fromkeys(wanted))
        assert request.params.allowed_token_ids is engine.requests[0].params.allowed_token_ids, "checked once"


def test_none_of_them_is_nothing() -> None:
    engine = FakeEngine()
    complete(engine, {"allowed_token_ids": None, "bad_words": None})
    complete(engine, {"bad_words": []})
    for request in engine.requests:
        assert (request.params.allowed_token_ids, request.params.bad_token_sequences) == (None, ())


def test_each_output_of_a_chat_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.api.sampling.MAX_ALLOWED_OF_ALL", 12)
    body = {**ASKS[CHAT], "allowed_token_ids": [1, 2, 3], "max_tokens": 1}
    assert post(FakeEngine(), CHAT, {**body, "n": 4}).status_code == 200
    assert refused(FakeEngine(), CHAT, {**body, "n": 5})["param"] == "allowed_token_ids"


def test_ids_that_repeat_count_once() -> None:
    engine = FakeEngine()
    body = {"prompt": ["a"] * 4, "n": 64, "allowed_token_ids": [7, 9] * 5000, "max_tokens": 1}
    assert post(engine, COMPLETIONS, body).status_code == 200
    assert {request.params.allowed_token_ids for request in engine.requests} == {TokenIds(np.array([7, 9]))}


# -- words and their tokens --------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer with a token per character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=12))
def test_spellings_that_end_in_another_are_left_out(words: list[str]) -> None:
    """An output has a bad sequence just where it has one of all spellings."""
    every = [tuple(map(ord, prefix + word)) for word in words for prefix in ("", " ")]
    found = bad_token_sequences(Letters(), words, 128)  # type: ignore[arg-type]
    assert set(found) <= set(every)
    assert len(set(found)) == len(found)
    for sequence in every:
        assert sum(sequence[len(sequence) - len(each) :] == each for each in found) == 1, "one of them, and once"


def test_what_is_left_out_does_not_count() -> None:
    words = [chr(0x4E00 + number) + "語" * 15 for number in range(128)]
    found = bad_token_sequences(Letters(), words, 2**17)  # type: ignore[arg-type]
    assert sum(map(len, found)) == 128 * 16, "of 4224 with a space before each"
    long = ["a" * 190 + chr(ord("b") + number) for number in range(25)]
    with pytest.raises(RequestError, match=r"^bad_words has 4775 tokens in all") as wrong:
        bad_token_sequences(Letters(), long, 2**17)  # type: ignore[arg-type]
    assert wrong.value.param == "bad_words"
    with pytest.raises(RequestError, match=r"^bad_words has 'aé', whose token 233 the model does not have") as wrong:
        bad_token_sequences(Letters(), ["b", "aé"], 200)  # type: ignore[arg-type]
    assert wrong.value.param == "bad_words"
