"""What a form of an output takes, and why it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from model_runner import RequestError
from serving.structured import Preamble, StructuredOutputsParams, grammar_text, limits

BYTES = LLTokenizer("byte")


def takes(text: str, after: Preamble | None = None, **asked: Any) -> bool:
    """Whether the form takes a text as a whole."""
    matcher = LLMatcher(BYTES, grammar_text(StructuredOutputsParams(**asked), after), log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens([*text.encode()]) == len(text.encode()) and matcher.is_accepting()


def refusal(**asked: Any) -> RequestError:
    with pytest.raises(RequestError) as wrong:
        grammar_text(StructuredOutputsParams(**asked))
    return wrong.value
