"""Decodes token ids into text while they are generated, and finds stop strings in it.

Text that was returned is final. So an incomplete character is held back, and so is the end of the text if it may be the
beginning of a stop string. All pieces together are what `tokenizer.decode(prompt + token_ids)` has behind
`tokenizer.decode(prompt)`, cut at the stop string, with one exception: if a tokenizer spells rare characters with byte
tokens (`<0xE4>`), `decode` replaces *every* byte of a run with an invalid byte; here only the invalid bytes are
replaced, because the others were returned already.

The prompt matters because many decoders strip the space of the first token. The first output token is not the first.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from serving.requests import RequestOutput
from serving.text.tokenizer import Vocabulary
from serving.text.words import StopMatcher, check_stop_strings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = 4  # previous tokens that a token's text may depend on: whether it is the first, what it is joined to
LOOKED_BACK = 1000  # tokens at the end of a prompt among which those with a text are looked for
INVALID = "\ufffd"


class Detokenizer:
    """Decodes one sequence token by token, with constant work per token.

    Args:
        skip_special_tokens: special tokens have no text.
        prompt: the tokens before the first decoded one; their own text is not returned.
        kept: special tokens that have a text nevertheless.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        skip_special_tokens: bool = True,
        prompt: Sequence[int] = (),
        kept: Collection[int] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special_tokens
        self._kept = kept
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []
        self._in_prompts_character = False
        with_text = (token for token in reversed(prompt[-LOOKED_BACK:]) if self._has_text(token))
        for token in reversed(list(islice(with_text, CONTEXT))):
            self.decode(token)
        self._in_prompts_character = bool(self._utf8.getstate()[0])

    def decode(self, token: int) -> str:
        """The characters that the token completes."""
        if not self._has_text(token):
            return ""
        vocabulary = self._vocabulary
        raw = vocabulary.raw(token)
        if raw is not None:
            text = self._own(self._utf8.decode(raw))
        else:
            before = vocabulary.decode(self._context)
            text = self.flush() + vocabulary.decode([*self._context, token])[len(before) :]
        if not vocabulary.all_bytes:
            self._context = [*self._context[1 - CONTEXT :], token]
        return text

    def flush(self) -> str:
        """The text of an incomplete character at the end: U+FFFD, or nothing if there is none."""
        return self._own(self._utf8.decode(b"", final=True))

    def _has_text(self, token: int) -> bool:
        """Whether the token has a text, or a part of one: it is in the vocabulary, and not skipped."""
        skipped = self._skip_special and self._vocabulary.is_special(token) and token not in self._kept
        return not skipped and self._vocabulary.raw(token) != b""

    def _own(self, text: str) -> str:
        """Text that is not the prompt's: a character that began there and stays incomplete was replaced there."""
        if text and self._in_prompts_character:
            self._in_prompts_character = False
            return text.removeprefix(INVALID)
        return text


class TextStream:
    """Text of one output, piece by piece, up to its stop string.

    The stop string that is complete first ends the text, even if it spans several tokens; of two that are complete at
    the same character, the longer one.

    Args:
        prompt: the tokens that the output follows; see `Detokenizer`.
        include_stop_str_in_output: the stop string, or the text of the stop token, is part of the text.
        skip_special_tokens: special tokens add no text.
        min_tokens: stop strings that are complete within the first `min_tokens` tokens are ignored.
        kept: special tokens that add their text nevertheless.

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
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        kept: Collection[int] = (),
    ) -> None:
        check_stop_strings(stop)
        self.text = ""
        self.stopped: str | None = None
        self.num_tokens = 0
        self._detokenizer = Detokenizer(
            Vocabulary.of(tokenizer), skip_special_tokens=skip_special_tokens, prompt=prompt, kept=kept
        )
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
