"""Grammars for tests: some without a library, and llguidance's on the example checkpoints."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path

import torch
from repository import TINY_CHAT
from torch import Tensor

from model_runner import GrammarRows, TokenGrammar
from serving.structured.matcher import GrammarCompiler, load_grammar_tokenizer

Allows = Callable[[Sequence[int]], Sequence[int]]
"""From an output to the tokens that may come next."""


class RuleMasks:
    """Fills the masks of `Rule`s, bit by bit."""

    def __init__(self, words: int) -> None:
        self.words = words

    def fill(self, requests: Sequence[GrammarRows], masks: Tensor) -> None:
        for request in requests:
            rule = request.grammar
            assert isinstance(rule, Rule)
            paths: list[list[int]] = [[]]
            for draft, token in enumerate(request.drafts):
                paths.append([*paths[draft if request.parents is None else request.parents[draft]], token])
            for node, path in enumerate(paths):
                if rule.count_allowed(path) == len(path):
                    for token in rule.allows([*rule.output, *path]):
                        masks[request.first + node, token // 32] |= _bit(token)


class Rule:
    """A grammar given by a function; see `TokenGrammar`."""

    def __init__(self, allows: Allows, masks: RuleMasks) -> None:
        self.allows, self.masks = allows, masks
        self.output: list[int] = []
        self.failure = ""

    @property
    def num_tokens(self) -> int:
        return len(self.output)

    def advance(self, tokens: Sequence[int]) -> None:
        assert self.count_allowed(tokens) == len(tokens), (self.output, tokens)
        self.output += tokens

    def count_allowed(self, tokens: Sequence[int]) -> int:
        count = 0
        while count < len(tokens) and tokens[count] in self.allows([*self.output, *tokens[:count]]):
            count += 1
        return count


def rule_rows(allowed: Sequence[Sequence[int]], vocab: int) -> Tensor:
    """Masks that allow these tokens, a row each."""
    masks = torch.zeros(len(allowed), -(-vocab // 32), dtype=torch.int32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            masks[row, token // 32] |= _bit(token)
    return masks


def _bit(token: int) -> int:
    return (1 << token % 32) - (1 << 32 if token % 32 == 31 else 0)


# ------------------------------------------------------------------------------------------------------- llguidance


@cache
def compiler(model: Path = TINY_CHAT, vocab_size: int | None = None) -> GrammarCompiler:
    """llguidance's grammars for a checkpoint."""
    config, generation = (json.loads((model / name).read_text()) for name in ("config.json", "generation_config.json"))
    ends = generation["eos_token_id"]
    size = config["vocab_size"] if vocab_size is None else vocab_size
    return GrammarCompiler(
        partial(load_grammar_tokenizer, model, size, tuple(ends) if isinstance(ends, list) else (ends,))
    )


def made(text: str, model: Path = TINY_CHAT) -> TokenGrammar:
    """A new grammar."""
    return compiler(model).begin(text).result(30)()


def regex(pattern: str) -> str:
    """The text of a grammar that allows what matches a regular expression."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(pattern)


def schema(value: dict[str, object]) -> str:
    """The text of a grammar that allows what fits a JSON schema, with no white space to go on for ever."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(value, overrides={"whitespace_flexible": False})


class Later:
    """Grammars that are ready when the test says so; see `serving.engine.rank.core.Grammars`."""

    def __init__(self, make: Callable[[str], TokenGrammar] = made) -> None:
        self._make = make
        self.begun: dict[str, Future[Callable[[], TokenGrammar]]] = {}

    def begin(self, text: str) -> Future[Callable[[], TokenGrammar]]:
        return self.begun.setdefault(text, Future())

    def close(self) -> None:
        """Nothing has been begun."""

    def finish(self, text: str) -> None:
        """The grammar is made."""
        self.begin(text).set_result(partial(self._make, text))
