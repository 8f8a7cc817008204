"""What a form of an output takes, and why it is refused."""

from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from model_runner import RequestError
from serving.structured import Preamble, StructuredOutputsParams, grammar_text, limits

BYTES = LLTokenizer("byte")


def takes(text: str, after: Preamble | None = None, **asked: Any) -> bool:
    """Whether the form takes a text as a whole."""
    return taker(after, **asked)(text)


def taker(after: Preamble | None = None, **asked: Any) -> Callable[[str], bool]:
    """Says of texts whether the form takes them."""
    made = LLMatcher(BYTES, grammar_text(StructuredOutputsParams(**asked), after), log_level=0, limits=limits())
    assert not made.is_error(), made.get_error()

    def taken(text: str) -> bool:
        matcher = made.deep_copy()
        return matcher.try_consume_tokens([*text.encode()]) == len(text.encode()) and matcher.is_accepting()

    return taken


def refusal(**asked: Any) -> RequestError:
    with pytest.raises(RequestError) as wrong:
        grammar_text(StructuredOutputsParams(**asked))
    return wrong.value
