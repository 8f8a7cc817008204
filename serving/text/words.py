"""Words of a request: stop strings, which end its output, and bad words, which the output must not have.

Stop strings are found in a text while it is generated, by the search of Knuth, Morris and Pratt: for each stop string,
one number says how many characters at the end of the text match its beginning. So memory is linear in the strings, and
work is linear in the text. The largest of these numbers is the length of text to hold back, because it may still become
a stop string.

Bad words are tokenized for `SamplingParams.bad_token_sequences`. A word is forbidden at the start of a text and after a
space: both spellings are tokenized, as in vLLM. The model can still write the word with other tokens, if the vocabulary
has several ways to spell it. A spelling that ends in another one is left out: the shorter one already forbids its last
token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from model_runner import MAX_BAD_TOKENS, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1000


def check_stop_strings(stop: Sequence[str]) -> None:
    """Check the stop strings' number, types and lengths.

    Raises:
        RequestError: there are too many, or one is empty, too long or not a string.
    """
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are taken.")
    for each in stop:
        if not isinstance(each, str):
            raise RequestError(f"stop must be strings, not {each!r}.")
        if not each:
            raise RequestError("a stop string is empty; it would stop before anything.")
        if len(each) > MAX_STOP_CHARACTERS:
            raise RequestError(f"a stop string has {len(each)} characters; it may have {MAX_STOP_CHARACTERS} at most.")


class StopMatcher:
    """Finds the first complete stop string in one text; of two complete at the same character, the longer one.

    None of them may be empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [(each, _borders(each)) for each in dict.fromkeys(stop)]
        self._matched = [0] * len(self._stop)

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, new: str, *, counts: bool = True) -> tuple[int, str] | None:
        """Search the next piece of the text.

        Args:
            counts: report stop strings that are complete in this piece; otherwise ignore them.

        Returns:
            (end of the stop string in `new`, stop string) of the first complete one, after which nothing may be fed;
            None if there is none.
        """
        found: tuple[int, str] | None = None
        for place in range(len(self._stop)):
            end = self._advance(place, new if found is None else new[: found[0]], counts)
            stop = self._stop[place][0]
            if end is not None and (found is None or (end, -len(stop)) < (found[0], -len(found[1]))):
                found = end, stop
        return found

    def _advance(self, place: int, new: str, counts: bool) -> int | None:
        """The end in `new` of the first match of one stop string; None if there is none or `counts` is False."""
        (stop, borders), matched = self._stop[place], self._matched[place]
        if not matched and stop[0] not in new:
            return None
        for end, character in enumerate(new, 1):
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                if counts:
                    return end
                matched = borders[-1]
        self._matched[place] = matched
        return None


@lru_cache(maxsize=4 * MAX_STOP_STRINGS)  # all outputs of a request have the same stop strings
def _borders(stop: str) -> array[int]:
    """For each prefix of a string: the length of its longest proper prefix that is also a suffix (KMP's table)."""
    borders = array("I", [0])
    border = 0
    for character in stop[1:]:
        while border and stop[border] != character:
            border = borders[border - 1]
        border += stop[border] == character
        borders.append(border)
    return borders


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
