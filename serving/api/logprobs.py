"""Log-probabilities in OpenAI's two formats (completions, chat) and vLLM's format for prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from model_runner import TokenLogprobs
from serving.text.detokenizer import Detokenizer
from serving.text.tokenizer import Vocabulary

LEAST = -9999.0  # replaces minus infinity, which JSON has no number for
COMPLETION_LISTS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


class JsonLists:
    """Growing lists stored as encoded JSON: a fraction of the objects' memory, and cheap to put into the answer."""

    def __init__(self, names: Iterable[str]) -> None:
        self._lists = {name: bytearray() for name in names}

    def __bool__(self) -> bool:
        return any(self._lists.values())

    def add(self, items: Mapping[str, Sequence[Any]]) -> None:
        """Append items to each list. A NaN or infinity becomes null."""
        for name, several in items.items():
            self._append(name, msgspec.json.encode(several)[1:-1])

    def extend(self, other: JsonLists) -> None:
        """Append the lists of another `JsonLists`."""
        for name, encoded in other._lists.items():
            self._append(name, encoded)

    def raw(self) -> dict[str, msgspec.Raw]:
        """The lists, for `msgspec.json.encode`."""
        return {name: msgspec.Raw(b"[" + bytes(encoded) + b"]") for name, encoded in self._lists.items()}

    def _append(self, name: str, encoded: bytes | bytearray) -> None:
        known = self._lists[name]
        if known and encoded:
            known += b","
        known += encoded


@dataclass(frozen=True)
class TokenNames:
    """Names of tokens in log-probabilities.

    Attributes:
        by_id: name tokens `token_id:5` instead of by their text.
    """

    vocabulary: Vocabulary
    by_id: bool = False

    def __getitem__(self, token: int) -> str:
        return f"token_id:{token}" if self.by_id else _shown(self.vocabulary.piece(token))


class CompletionLogprobsWriter:
    """Writes the log-probabilities of a completion: parallel lists, with each token's offset in the text.

    Args:
        num_top: most likely tokens listed per position.
        offset: offset of the first token, in characters.
        prompt: the tokens before the first one.
    """

    def __init__(
        self, names: TokenNames, num_top: int, *, skip_special_tokens: bool, offset: int = 0, prompt: Sequence[int] = ()
    ) -> None:
        self._names, self.num_top = names, num_top
        self._text = Detokenizer(names.vocabulary, skip_special_tokens=skip_special_tokens, prompt=prompt)
        self._offset = offset

    def write(self, tokens: Sequence[tuple[int, TokenLogprobs | None]]) -> dict[str, list[Any]]:
        """The lists for the next tokens. A token without a log-probability (the first of a prompt) has entry None."""
        offsets: list[int] = []
        for token, _ in tokens:
            offsets.append(self._offset)
            self._offset += len(self._text.decode(token))
        return {
            "text_offset": offsets,
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for _, entry in tokens],
            "tokens": [self._names[token] for token, _ in tokens],
            "top_logprobs": [None if entry is None else self._top(entry) for _, entry in tokens],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The chosen token, then the most likely ones. Tokens with the same name have the most likely one's number."""
        top: dict[str, float] = {}
        for token, logprob in ((entry.token, entry.logprob), *entry.top[: self.num_top]):
            name = self._names[token]
            top[name] = max(_finite(logprob), top.get(name, LEAST))
        return top


def chat_logprobs(names: TokenNames, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """The log-probabilities of a chat completion: one object per token.

    As in vLLM, `top_logprobs` has the chosen token first, then the most likely ones, as many in all as were asked for.
    """
    return [
        {
            **_token(names, entry.token, entry.logprob),
            "top_logprobs": [_token(names, token, logprob) for token, logprob in _chosen_first(entry)],
        }
        for entry in entries
    ]


def _chosen_first(entry: TokenLogprobs) -> list[tuple[int, float]]:
    others = [(token, logprob) for token, logprob in entry.top if token != entry.token]
    return [(entry.token, entry.logprob), *others][: len(entry.top)]


def prompt_logprobs(
    vocabulary: Vocabulary, entries: Sequence[TokenLogprobs | None], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """The log-probabilities of a prompt in vLLM's format: per token, token id -> its entry; None for the first token.

    The prompt's own token comes first, then the most likely ones.

    Args:
        num_top: most likely tokens listed per position, besides the prompt's own token.
    """

    def told(entry: TokenLogprobs) -> dict[str, dict[str, Any]]:
        likeliest = [(token, logprob, place) for place, (token, logprob) in enumerate(entry.top[:num_top], start=1)]
        return {
            str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": _shown(vocabulary.piece(token))}
            for token, logprob, rank in ((entry.token, entry.logprob, entry.rank), *likeliest)
        }

    return [None if entry is None else told(entry) for entry in entries]


def _token(names: TokenNames, token: int, logprob: float) -> dict[str, Any]:
    return {"token": names[token], "logprob": _finite(logprob), "bytes": list(names.vocabulary.piece(token))}


def _shown(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
