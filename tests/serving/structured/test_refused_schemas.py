"""What is refused is a subset of what vLLM refuses, but for what it takes without looking at it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from forms import refusal
from llguidance import LLMatcher
from vllm_schemas import NOT_LOOKED_AT, REFUSED_BY_XGRAMMAR, STRICTER, XGRAMMAR_FORMATS

from serving.structured.patterns import LIBRARY_FORMATS, OWN_FORMATS, REFUSED_FORMATS
from serving.structured.schema import REFUSED

VALUES: dict[str, Any] = {"uniqueItems": True, "minContains": 2, "maxContains": 2, "propertyNames": {"maxLength": 1}}
VALUES["contains"] = {"const": 1}


def fault_of_guidance(schema: Any) -> str:
    """Why vLLM's second choice refuses a schema."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return LLMatcher.validate_grammar(grammar)


def test_each_refused_keyword_is_accounted_for() -> None:
    assert {keyword for keyword in REFUSED if keyword not in REFUSED_BY_XGRAMMAR} == NOT_LOOKED_AT


@pytest.mark.parametrize("keyword", [keyword for keyword in REFUSED if keyword in REFUSED_BY_XGRAMMAR])
def test_refused_keywords_are_refused_there(keyword: str) -> None:
    for kind in REFUSED_BY_XGRAMMAR[keyword]:
        schema = {"type": kind, "contains": VALUES["contains"], keyword: VALUES[keyword]}
        if "contains" not in keyword.lower():
            del schema["contains"]
        assert keyword in fault_of_guidance(schema)
        assert refusal(json=schema)


@pytest.mark.parametrize("name", sorted(REFUSED_FORMATS))
def test_refused_formats_are_refused_there(name: str) -> None:
    assert name not in XGRAMMAR_FORMATS
    assert "Unknown format" in fault_of_guidance({"type": "string", "format": name})


def test_formats_that_are_taken_there_are_taken() -> None:
    assert OWN_FORMATS.keys() | LIBRARY_FORMATS >= XGRAMMAR_FORMATS


@pytest.mark.parametrize("keyword", STRICTER)
def test_schemas_that_are_taken_there_only_are_known(keyword: str) -> None:
    schema, _ = STRICTER[keyword]
    assert keyword in str(refusal(json=schema))
