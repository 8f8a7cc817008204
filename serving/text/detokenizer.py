"""Decodes token ids into text while they are generated, and finds stop strings in it.

Text that was returned is final. So an incomplete character is held back, and so is the end of the text if it may be the
beginning of a stop string. All pieces together are `tokenizer.decode(token_ids)`, cut at the stop string, with one
exception: if a tokenizer spells rare characters with byte tokens (`<0xE4>`), `decode` replaces *every* byte of a run
with an invalid byte; here only the invalid bytes are replaced, because the others were returned already.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from serving.requests import RequestOutput
from serving.text.stop_strings import StopMatcher, check_stop_strings
from serving.text.tokenizer import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Detokenizer", "TextStream"]

CONTEXT = 4  # previous tokens that a token's text may depend on: whether it is the first, what it is joined to


class Detokenizer:
    """Decodes one sequence token by token, with constant work per token."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []

    def decode(self, token: int) -> str:
        """The characters that the token completes."""
        vocabulary = self._vocabulary
        if self._skip_special and vocabulary.is_special(token):
            return ""
        raw = vocabulary.raw(token)
        if raw == b"":
            return ""
        if raw is not None:
            text = self._utf8.decode(raw)
        else:
            before = vocabulary.decode(self._context)
            text = self.flush() + vocabulary.decode([*self._context, token])[len(before) :]
        if not vocabulary.all_bytes:
            self._context = [*self._context[1 - CONTEXT :], token]
        return text

    def flush(self) -> str:
        """The text of an incomplete character at the end: U+FFFD, or nothing if there is none."""
        return self._utf8.decode(b"", final=True)


class TextStream:
    """Text of one output, piece by piece, up to its stop string.

    The stop string that is complete first ends the text, even if it spans several tokens; of two that are complete at
    the same character, the longer one.

    Args:
        include_stop_str_in_output: the stop string, or the text of the stop token, is part of the text.
        skip_special_tokens: special tokens add no text.
        min_tokens: stop strings that are complete within the first `min_tokens` tokens are ignored.

    Raises:
        RequestError: see `check_stop_strings`.

    Attributes:
        text: all text returned so far.
        stopped: the stop string that was found; None before.
        num_tokens: tokens taken, up to and with the one that completed the stop string.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        check_stop_strings(stop)
        self.text = ""
        self.stopped: str | None = None
        self.num_tokens = 0
        self._detokenizer = Detokenizer(Vocabulary.of(tokenizer), skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._held = ""  # the end of the text, held back because it may be the beginning of a stop string

    def push(self, token_ids: Sequence[int], *, finished: bool = False) -> str:
        """Take the next tokens; returns the new text that is final. With `finished`, nothing is held back."""
        parts: list[str] = []
        for token in token_ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            parts.append(self._search(self._detokenizer.decode(token)))
        if finished and self.stopped is None:
            parts.append(self._search(self._detokenizer.flush()))
            if self.stopped is None:
                parts.append(self._held)
                self._held = ""
        text = "".join(parts)
        self.text += text
        return text

    def take(self, output: RequestOutput) -> str:
        """Take an engine's output. The stop token adds no text, unless `include_stop_str_in_output` is set."""
        tokens, finished = output.token_ids, output.finish_reason is not None
        if output.stop_token is None or self._include_stop:
            return self.push(tokens, finished=finished)
        text = self.push(tokens[:-1], finished=finished)
        self.num_tokens += self.stopped is None
        return text

    def _search(self, new: str) -> str:
        """Look for stop strings that end in `new`; returns the text that is final."""
        match = self._matcher.feed(new, counts=self.num_tokens > self._min_tokens)
        text = self._held + new
        if match is not None:
            end, self.stopped = match
            end += len(self._held)
            return text[: end if self._include_stop else end - len(self.stopped)]
        certain = len(text) - self._matcher.held
        self._held = text[certain:]
        return text[:certain]
