"""Bad words as tokens: what `SamplingParams.bad_token_sequences` is made of.

A word is forbidden as it begins a text and as it follows a space: both spellings are tokenized, as vLLM does it. It
comes out spelled with other tokens nevertheless, where the vocabulary has several ways to write it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from model_runner import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["MAX_BAD_WORDS", "MAX_BAD_WORD_CHARACTERS", "bad_token_sequences", "check_bad_words"]

MAX_BAD_WORDS = 128
"""vLLM's limit."""
MAX_BAD_WORD_CHARACTERS = 200


def check_bad_words(words: Sequence[str]) -> None:
    """Refuse words that cannot work, or that are too many or too long.

    Raises:
        RequestError: there is one.
    """
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words has {len(words)} words; at most {MAX_BAD_WORDS} are taken.")
    for word in words:
        if not isinstance(word, str):
            raise RequestError(f"bad_words must be strings, not {word!r}.")
        if not word.strip():
            raise RequestError(f"bad_words has {word!r}, in which there is no word.")
        if len(word) > MAX_BAD_WORD_CHARACTERS:
            raise RequestError(f"a bad word has {len(word)} characters; it may have {MAX_BAD_WORD_CHARACTERS} at most.")
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"a bad word is no text: it has half of a surrogate pair ({error}).") from error


def bad_token_sequences(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word without and with a space before it; what is the same is there once.

    Raises:
        RequestError: a word cannot work, has no tokens, or the words are too many or too long.
    """
    check_bad_words(words)
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        spellings = [tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")]
        if not spellings[0]:
            raise RequestError(f"the tokenizer makes no token of the bad word {word!r}.")
        found.update(dict.fromkeys(filter(None, spellings)))
    return tuple(found)
