"""Some 250 JSON schemas, by the mask alone: valid documents are taken token by token, others stopped where they break.

A refused token is refused neither too early, as valid documents show, nor too late: what came before it can be
completed to a valid document, which is done here, by tokens that the mask allows.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
from json_documents import Documents, is_bounded, is_valid, texts_of
from llguidance import LLMatcher, LLTokenizer
from repository import TINY_CHAT
from schema_features import FEATURES
from schema_tools import TOOLS

from model_runner import SamplingParams
from serving import LLM
from serving.structured import StructuredOutputsParams, grammar_text, limits
from serving.structured.matcher import grammar_tokenizer
from serving.text.tokenizer import load_tokenizer

SCHEMAS: Mapping[str, Any] = {**FEATURES, **TOOLS}
EACH = 10
_LONGEST = 600
_FIRST = [*'"@}]:', *"0123456789", *"entf,.ablrsux-TZ{["]
_NO_END_FOUND = {"string pattern at the end"}
"""Their ends are too rare to be found."""


@cache
def tokens() -> LLTokenizer:
    loaded = load_tokenizer(TINY_CHAT)
    return grammar_tokenizer(loaded, len(loaded), [loaded.eos_token_id])


@cache
def preferred() -> list[tuple[int, bytes]]:
    """All tokens with their bytes; those that end documents come first."""
    known = [(number, tokens().decode_bytes([number])) for number in range(tokens().vocab_size)]
    order = {text.encode(): place for place, text in enumerate(_FIRST)}
    usable = [(number, text) for number, text in known if text and not tokens().is_special_token(number)]
    return sorted(usable, key=lambda token: (order.get(token[1], 99), len(token[1])))


def matcher_of(schema: Any) -> LLMatcher:
    text = grammar_text(StructuredOutputsParams(json=schema if isinstance(schema, dict) else json.dumps(schema)))
    matcher = LLMatcher(tokens(), text, log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def completed(matcher: LLMatcher, begun: bytes) -> bytes | None:
    """The document that begins so, ended by tokens that the mask allows; None if no end is found."""
    out = begun
    for step in range(_LONGEST):
        if matcher.is_accepting():
            return out
        mask = matcher.compute_bitmask()
        allowed = [token for token in preferred() if mask[token[0] // 8] >> token[0] % 8 & 1]
        if not allowed:
            return None
        number, text = allowed[0] if step < 100 else allowed[step * 7919 % len(allowed)]
        assert matcher.consume_token(number)
        out += text
    return None


@pytest.mark.long
@pytest.mark.sample(25)
@pytest.mark.parametrize("name", SCHEMAS)
def test_documents_by_the_mask_alone(name: str) -> None:
    schema = SCHEMAS[name]
    documents = Documents(schema, seed=len(name))
    values = documents.valid(EACH)
    valid = texts_of(values, EACH)
    assert valid
    whole = matcher_of(schema)
    for text in valid:
        matcher, ids = whole.deep_copy(), tokens().tokenize_str(text)
        taken = matcher.try_consume_tokens(ids)
        assert taken == len(ids), f"{text} is stopped after {tokens().decode_str(ids[:taken])}"
        assert matcher.is_accepting(), text
    broken = documents.broken(values, EACH)
    assert len(broken) == EACH
    for text in broken:
        matcher, ids = whole.deep_copy(), tokens().tokenize_str(text)
        taken = matcher.try_consume_tokens(ids)
        assert taken < len(ids) or not matcher.is_accepting(), f"{text} is taken"
        begun = tokens().decode_bytes(ids[:taken])
        matcher = whole.deep_copy()
        matcher.try_consume_tokens(ids[:taken])
        if name in _NO_END_FOUND or any(each.encode().startswith(begun) for each in valid):
            continue
        end = completed(matcher, begun)
        assert end is not None, f"{text}: no end was found for {begun!r}"
        assert is_valid(schema, json.loads(end)), f"{text}: {end!r} is not valid"


def test_there_are_enough() -> None:
    assert len(SCHEMAS) >= 200
    assert len({json.dumps(schema, sort_keys=True) for schema in SCHEMAS.values()}) >= 200


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
