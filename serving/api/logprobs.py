"""Log-probabilities in the two shapes that OpenAI gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model_runner import TokenLogprobs
from serving.text import Detokenizer, Vocabulary

__all__ = ["CompletionLogprobsWriter", "chat_logprobs"]

LEAST = -9999.0  # stands for minus infinity, which JSON cannot say


class CompletionLogprobsWriter:
    """Those of completions: lists side by side, with where each token begins in the text.

    Args:
        vocabulary: of the model's tokenizer.
        skip_special_tokens: as for the text.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._text = Detokenizer(vocabulary, skip_special_tokens=skip_special_tokens)
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], length: int) -> dict[str, Any]:
        """Of a prompt whose text, that begins the choice's, has `length` characters."""
        written = self._write([(token, entry) for token, entry in zip(token_ids, entries, strict=True)])
        written["text_offset"] = [min(offset, length) for offset in written["text_offset"]]
        # The output's text begins anew, behind the prompt's.
        self._text = Detokenizer(self._vocabulary, skip_special_tokens=self._skip_special_tokens)
        self._offset = length
        return written

    def output(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Of the next tokens of the output."""
        return self._write([(entry.token, entry) for entry in entries])

    def _write(self, tokens: Sequence[tuple[int, TokenLogprobs | None]]) -> dict[str, Any]:
        offsets: list[int] = []
        for token, _ in tokens:
            offsets.append(self._offset)
            self._offset += len(self._text.decode(token))
        return {
            "text_offset": offsets,
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for _, entry in tokens],
            "tokens": [_shown(self._vocabulary.piece(token)) for token, _ in tokens],
            "top_logprobs": [None if entry is None else self._top(entry) for _, entry in tokens],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the one that was chosen. Where two read the same, the likelier one."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(_shown(self._vocabulary.piece(token)), _finite(logprob))
        return top


def chat_logprobs(vocabulary: Vocabulary, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Those of chat completions: one object per token."""
    content = [
        {
            **_token(vocabulary, entry.token, entry.logprob),
            "top_logprobs": [_token(vocabulary, token, logprob) for token, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _token(vocabulary: Vocabulary, token: int, logprob: float) -> dict[str, Any]:
    piece = vocabulary.piece(token)
    return {"token": _shown(piece), "logprob": _finite(logprob), "bytes": list(piece)}


def _shown(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
