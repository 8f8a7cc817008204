"""From what a user asks for to a grammar: regular expressions, choices, grammars, structural tags, and reasoning.

What is refused of schemas is a subset of what vLLM refuses, but for what it takes without looking at it.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from forms import refusal, takes
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from model_runner import RequestError
from serving.structured import Preamble
from serving.structured.patterns import LIBRARY_FORMATS, OWN_FORMATS, REFUSED_FORMATS, translated
from serving.structured.schema import REFUSED

# -- regular expressions

SAME = [
    *("a|bc", "(a|b)*c?", "[^a-c]{2}", "\\d\\w\\s", "\\D\\W\\S", "[\\d\\s]{2}", "[^\\d\\s]{2}", "[\\[a&~-]{2}"),
    *("a{,2}b", "a{x}", "\\(\\)\\[\\]\\{\\}", "(?:a|b)c", "(?P<n>a)b", "(?i:ab)", "a+?b*?", "\\x41\\u0042", "\\t\\n"),
    *("[\\b]", "/\\/", "[^\\W]", "[]a]", "\\D+\\W+", "[\\s]?x{2}\\x41+", '[^"b]+', "[^\\\\]*"),
]

SIGNS = "abcABx1 _-.[]{}()&~^/\\\t\n\x08é٣½²　\u2028"


@pytest.mark.parametrize(
    "regex", ["\\d", "\\D", "\\w", "\\W", "\\s", "\\S", "[^\\d]", "[^\\D]", "[^\\w]", "[^\\W]", "[^\\s]", "[^\\S]"]
)
def test_classes_take_what_python_takes(regex: str) -> None:
    taken = [sign for sign in f"{SIGNS}\x1c" if takes(sign, regex=regex)]
    assert taken
    assert all(re.fullmatch(regex, sign) for sign in taken)


@pytest.mark.long
@pytest.mark.wide_sample(4)
@pytest.mark.parametrize("regex", SAME)
@given(text=st.text(alphabet=SIGNS, max_size=4))
def test_what_a_regex_takes_python_takes(regex: str, text: str) -> None:
    if takes(text, regex=regex):
        assert re.fullmatch(regex, text)
    elif text.isascii():
        assert not re.fullmatch(regex, text)


@pytest.mark.parametrize(
    "regex",
    ["(?=a)", "(?!a)", "(?<=a)b", "(?<!a)b", "(a)\\1", "(?P<n>a)(?P=n)", "\\bfoo", "a++b", "(?x)a", "(?>a)", "[a"],
)
def test_other_regexes_are_refused(regex: str) -> None:
    with pytest.raises(RequestError, match="regular expression has"):
        translated(regex)
    assert refusal(json={"type": "string", "pattern": regex}).param == "json"


# -- other forms


def test_choices_are_texts_as_they_are() -> None:
    choices = ['"', "\\n", "\n", "/a/", "a b", "é", "😀", "%json {}", "a", "ab"]
    for text in choices:
        assert takes(text, choice=choices), text
    for text in ("", "b", "\\", "a ", "é😀"):
        assert not takes(text, choice=choices), text


def test_grammars_in_both_notations() -> None:
    for grammar in ('start: "a" B+\nB: /[0-9]/', 'root ::= "a" b+ # x\nb ::= [0-9]'):
        assert [takes(text, grammar=grammar) for text in ("a12", "a", "12")] == [True, False, False]
    for grammar in ("a", "start = a", "root ::= x", 'root ::= "a'):
        assert refusal(grammar=grammar).param == "grammar"
    for option in ("max_tokens=5", "temperature=0.5", 'stop="x"'):
        assert option.split("=")[0] in str(refusal(grammar=f"start: a\na[{option}]: /.*/"))
    assert takes("max_tokens=5 [max_tokens=5]:", grammar='start: "max_tokens=5 [max_tokens=5]:" // a[max_tokens=5]')


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CALL = {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": OBJECT}, "end": "</f>"}
WORDS = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": ["</t>", "</u>"]}
ONE_OF = {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL]}
SEPARATED = {"type": "tags_with_separator", "tags": [CALL]}
ONCE = {"at_least_one": True, "stop_after_first": True}
TAGS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (CALL, ['<f=a>{"a":1}</f>'], ["", '<f=a>{"b":1}</f>', "<f=a></f>"]),
    ({"type": "sequence", "elements": [WORDS, {"type": "any_text"}]}, ["<t>a</t>", "<t>a</u>b"], ["<t>a", "a"]),
    (
        {"type": "or", "elements": [{"type": "const_string", "value": "x"}, {"type": "regex", "pattern": "[0-9]"}]},
        ["x", "5"],
        ["", "x5"],
    ),
    (
        {"type": "sequence", "elements": [{"type": "grammar", "grammar": 'root ::= "a"'}, CALL]},
        ['a<f=a>{"a":1}</f>'],
        ["a"],
    ),
    (ONE_OF, ["", "a", 'a <f=a>{"a":1}</f>', '<f=a>{"a":1}</f>b<f=a>{"a":2}</f>'], ["<f=b>", "a<f=a>{}"]),
    ({**ONE_OF, **ONCE}, ['a<f=a>{"a":1}</f>'], ["", "a", '<f=a>{"a":1}</f>b']),
    ({**SEPARATED, "separator": ","}, ["", '<f=a>{"a":1}</f>,<f=a>{"a":1}</f>'], ['<f=a>{"a":1}</f>,']),
    ({**SEPARATED, "separator": "", **ONCE}, ['<f=a>{"a":1}</f>'], ["", '<f=a>{"a":1}</f><f=a>{"a":1}</f>']),
    *(
        ({"type": kind, "content": {"type": "const_string", "value": "ab"}, **more}, fits, fits_not)
        for kind, more, fits, fits_not in (
            ("optional", {}, ["", "ab"], ["abab"]),
            ("plus", {}, ["ab", "abab"], [""]),
            ("star", {}, ["", "abab"], ["a"]),
            ("repeat", {"min": 1, "max": 2}, ["ab", "abab"], ["", "ababab"]),
            ("repeat", {"min": 2, "max": -1}, ["abab", "ababab"], ["ab"]),
        )
    ),
]


@pytest.mark.parametrize(("form", "fits", "fits_not"), TAGS)
def test_structural_tags(form: dict[str, Any], fits: list[str], fits_not: list[str]) -> None:
    tag = {"type": "structural_tag", "format": form}
    assert [text for text in (*fits, *fits_not) if takes(text, structural_tag=tag)] == fits
    assert takes(fits[0], structural_tag=json.dumps(tag))


def test_older_structural_tags() -> None:
    tag = {"structures": [{"begin": "<f=a>", "schema": OBJECT, "end": "</f>"}], "triggers": ["<f="]}
    assert [takes(text, structural_tag=tag) for text in ("hi", '<f=a>{"a":1}</f>x', "<f=b>")] == [True, True, False]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "the type 'qwen_xml_parameter' is not supported"),
        ({"type": "any_text", "excludes": ["a"]}, "'excludes' is not supported"),
        ({"type": "any_text", "max_tokens": 5}, "'max_tokens' is not supported"),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, CALL]},
            "format.elements.0: any_text is only supported",
        ),
        ({"type": "json_schema", "json_schema": {"not": {}}}, "format: not: not is not supported"),
        ({"type": "json_schema", "json_schema": {}, "style": "deepseek_xml"}, "the style 'deepseek_xml'"),
        ({"type": "tag", "begin": {"type": "token", "token": 5}, "content": CALL, "end": "x"}, "begin is a text"),
        ({**ONE_OF, "triggers": ["<g"]}, "exactly one of the triggers"),
        ({"type": "repeat", "min": 2, "max": 1, "content": CALL}, "integers from 0"),
        ({"type": "or", "elements": []}, "not empty"),
        ({"type": "regex", "pattern": "a", "style": "json"}, "format: 'style' is not supported in 'regex'"),
        ({"type": "star", "content": CALL, "max": 5}, "format: 'max' is not supported in 'star'"),
    ],
)
def test_other_tags_are_refused_by_place(form: dict[str, Any], message: str) -> None:
    error = refusal(structural_tag={"type": "structural_tag", "format": form})
    assert message in str(error)
    assert error.param == "structural_tag"


def test_reasoning_comes_first() -> None:
    asked = {"json": OBJECT}
    begun = Preamble("<think>", "</think>", begun=True)
    assert takes('{"b": 1} so</think>{"a": 1}', begun, **asked)
    assert takes('</think>{"a": 1}', begun, **asked)
    for text in ('{"a": 1}', '</think></think>{"a": 1}', '</think>{"b": 1}', "so"):
        assert not takes(text, begun, **asked), text
    not_begun = Preamble("<think>", "</think>")
    assert takes('<think>{"b": 1} so</think>{"a": 1}', not_begun, **asked)
    assert takes('{"a": 1}', not_begun, **asked)
    assert not takes('so</think>{"a": 1}', not_begun, **asked)


# -- what vLLM refuses: facts, read in copies of its source; it was not run
# Its `auto` asks xgrammar's check first, and takes a schema that this passes. What it refuses goes to llguidance, as
# that library reads it without help; schemas with `patternProperties` go to outlines in its place.

REFUSED_BY_XGRAMMAR: Mapping[str, tuple[str, ...]] = {
    "multipleOf": ("integer", "number"),
    **dict.fromkeys(("uniqueItems", "contains", "minContains", "maxContains"), ("array",)),
    **dict.fromkeys(("patternProperties", "propertyNames"), ("object",)),
}
"""Keyword -> the `type`s beside which xgrammar's check refuses it."""
XGRAMMAR_FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer"),
        *("relative-json-pointer", "time", "uri", "uri-reference", "uri-template", "uuid"),
    }
)
"""It refuses any other `format` of a string."""
NOT_LOOKED_AT = frozenset(
    {
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords that xgrammar's check does not look at, and that no grammar here can make. Whether an output is valid is not
told then, and llguidance, asked alone, refuses each. They are refused here."""
STRICTER: Mapping[str, tuple[dict[str, object], str]] = {
    "oneOf": (
        {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
        "it passes the check; xgrammar takes it for anyOf, and writes what fits two options",
    ),
    "multipleOf": (
        {"type": "number", "multipleOf": 0.01},
        "llguidance writes 0.07, which validators in floats call no multiple of 0.01",
    ),
    "const": ({"const": 2**53 + 1}, "llguidance rounds it"),
    "minimum": ({"type": "number", "minimum": 1e19}, "llguidance writes bounds as integers of 64 bits"),
    "minProperties": ({"type": "object", "minProperties": 2}, "the same name, written twice, is counted as two"),
}
"""What is refused here in some schemas only, and taken by vLLM -> such a schema, and why it is not taken here."""


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
