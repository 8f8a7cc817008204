"""What an engine generates by a schema, greedily and sampled: it is valid if it ends, and ends where it is bounded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from json_documents import is_bounded, is_valid
from repository import TINY_CHAT
from schema_features import FEATURES
from schema_tools import TOOLS

from model_runner import SamplingParams
from serving import LLM
from serving.structured import StructuredOutputsParams, grammar_text

SCHEMAS: Mapping[str, Any] = {**FEATURES, **TOOLS}
PARTS = 20
MAX_TOKENS = 500
REGEXES = ["[0-9]{3}-[0-9]{4}", "(yes|no|maybe)!?", "\\d{1,2}/\\d{1,2}", "[^\\W\\d_]{2,5}", "a?b?c?", "\\S\\W{2}"]
CHOICES = [["positive", "negative"], ["a", "ab", "abc"], ["é", "漢字", '"\\\n'], [f"choice {n}" for n in range(200)]]
GRAMMARS = ['start: "a" | "b" start', 'root ::= ("x" | "y"){3}']


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TINY_CHAT, max_num_seqs=64, kv_cache_memory="64M") as llm:
        yield llm


def generated(llm: LLM, forms: list[dict[str, Any]]) -> Iterator[tuple[int, str | None, str]]:
    """(number of the form, why its output ended, its text), greedily and sampled, all at once."""
    grammars = [grammar_text(StructuredOutputsParams(**form)) for form in forms]
    params = [
        SamplingParams(temperature=temperature, seed=number, max_tokens=MAX_TOKENS, grammar=grammar)
        for temperature in (0.0, 1.0)
        for number, grammar in enumerate(grammars)
    ]
    for number, output in enumerate(llm.generate(["It is: "] * len(params), params)):
        yield number % len(forms), output.outputs[0].finish_reason, output.outputs[0].text


@pytest.mark.wide
@pytest.mark.long
@pytest.mark.sample(10)
@pytest.mark.parametrize("part", range(PARTS))
def test_outputs_are_valid(llm: LLM, part: int) -> None:
    names = list(SCHEMAS)[part::PARTS]
    ended = 0
    for number, reason, text in generated(llm, [{"json": json.dumps(SCHEMAS[name])} for name in names]):
        schema = SCHEMAS[names[number]]
        if reason == "length":
            assert not is_bounded(schema, schema), f"{names[number]} does not end: {text}"
            continue
        assert reason == "stop", names[number]
        assert is_valid(schema, json.loads(text)), f"{names[number]}: {text}"
        ended += 1
    assert ended > len(names), "more than half of all"


@pytest.mark.long
def test_other_forms(llm: LLM) -> None:
    forms: list[dict[str, Any]] = [
        *({"regex": regex} for regex in REGEXES),
        *({"choice": choices} for choices in CHOICES),
        *({"grammar": grammar} for grammar in GRAMMARS),
        {"json": {"type": "object", "properties": {"a": {"type": "null"}}}, "disable_additional_properties": True},
        {
            "json": {"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3},
            "disable_any_whitespace": True,
        },
    ]
    for number, reason, text in generated(llm, forms):
        form = forms[number]
        assert reason == "stop" or form == {"grammar": GRAMMARS[0]}, form
        if "regex" in form:
            assert re.fullmatch(form["regex"], text), (form, text)
        elif "choice" in form:
            assert text in form["choice"], (form, text)
        elif form == {"grammar": GRAMMARS[0]}:
            assert re.fullmatch("b*a?", text)
        elif "grammar" in form:
            assert re.fullmatch("[xy]{3}", text)
        elif "disable_any_whitespace" in form:
            assert text == "[1,1,1]"
        else:
            assert json.loads(text) in ({}, {"a": None}), text
