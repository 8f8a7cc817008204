"""Tokenizes bad words for `SamplingParams.bad_token_sequences`.

A word is forbidden at the start of a text and after a space: both spellings are tokenized, as in vLLM. The model can
still write the word with other tokens, if the vocabulary has several ways to spell it.

A spelling that ends in another one is left out: the shorter one already forbids its last token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from model_runner import MAX_BAD_TOKENS, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_BAD_WORDS = 128
"""vLLM's limit."""
MAX_BAD_WORD_CHARACTERS = 200

_Sequences = tuple[tuple[int, ...], ...]


def check_bad_words(words: Sequence[str]) -> None:
    """Check the words' number, types and lengths.

    Raises:
        RequestError: there are too many words, or one is empty, too long or not valid text.
    """
    if len(words) > MAX_BAD_WORDS:
        raise _wrong(f"bad_words has {len(words)} words; at most {MAX_BAD_WORDS} are taken.")
    for word in words:
        if not isinstance(word, str):
            raise _wrong(f"bad_words must be strings, not {word!r}.")
        if not word.strip():
            raise _wrong(f"bad_words has {word!r}, which is only white space.")
        if len(word) > MAX_BAD_WORD_CHARACTERS:
            raise _wrong(f"a bad word has {len(word)} characters; it may have {MAX_BAD_WORD_CHARACTERS} at most.")
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise _wrong(f"a bad word is not valid text: it has an unpaired surrogate ({error}).") from error


def bad_token_sequences(tokenizer: PreTrainedTokenizerBase, words: Sequence[str], vocab_size: int) -> _Sequences:
    """The token sequences of each word, without and with a space before it. Those that end in another one are left out.

    Raises:
        RequestError: see `check_bad_words`; or a word has no tokens or one outside the vocabulary, or the words have
            more than `MAX_BAD_TOKENS` tokens in total.
    """
    check_bad_words(words)
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        spellings = [tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")]
        if not spellings[0]:
            raise _wrong(f"the tokenizer makes no token of the bad word {word!r}.")
        highest = max(map(max, filter(None, spellings)))
        if highest >= vocab_size:
            message = f"bad_words has {word!r}, whose token {highest} the model does not have ({vocab_size} tokens)."
            raise _wrong(message)
        found.update(dict.fromkeys(filter(None, spellings)))
    needed = _needed(found)
    count = sum(map(len, needed))
    if count > MAX_BAD_TOKENS:
        raise _wrong(
            f"bad_words has {count} tokens in all, with a space before each word and without; at most {MAX_BAD_TOKENS} "
            f"are taken. Give fewer or shorter words."
        )
    return needed


def _needed(sequences: Iterable[tuple[int, ...]]) -> _Sequences:
    """The sequences that do not end in another one. Sorted by reversed tokens, those that do follow the one they end
    in."""
    kept: list[tuple[int, ...]] = []
    for each in sorted({sequence[::-1] for sequence in sequences}):
        if not kept or each[: len(kept[-1])] != kept[-1]:
            kept.append(each)
    found = set(kept)
    return tuple(sequence for sequence in sequences if sequence[::-1] in found)


def _wrong(message: str) -> RequestError:
    return RequestError(message, param="bad_words")
