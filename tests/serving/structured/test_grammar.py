"""From what a user asks for to a grammar: keywords of JSON Schema, `oneOf`, patterns, and the forms besides JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from model_runner import RequestError
from serving.structured import Preamble, StructuredOutputsParams, grammar_text, limits
from serving.structured.limits import MAX_DEPTH, MAX_REGEX_BYTES, MAX_TEXT_BYTES
from serving.structured.patterns import translated
from serving.structured.schema import REFUSED

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


# -- keywords

VALUES: Mapping[str, Any] = {
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "dependencies": {"a": ["b"]},
}
VALUES |= {"uniqueItems": True, "minContains": 2, "maxContains": 2, "$dynamicRef": "#a", "$recursiveRef": "#"}
WITH = {"then": {"if": {"type": "null"}}, "else": {"if": {"type": "null"}}}
WITH |= {name: {"allOf": [{}]} for name in ("unevaluatedProperties", "unevaluatedItems")}
WITH |= {name: {"contains": {"const": 1}} for name in ("minContains", "maxContains")}
IGNORED: Mapping[str, Any] = {
    **dict.fromkeys(("title", "description", "$comment", "contentMediaType", "contentEncoding"), "x"),
    **{
        "default": 5,
        "examples": [5],
        "readOnly": True,
        "writeOnly": True,
        "deprecated": True,
        "contentSchema": {"not": {}},
    },
    **{"$schema": "https://example.org/x", "$id": "https://example.org/a", "$anchor": "a", "$vocabulary": {}},
    **{
        "$dynamicAnchor": "a",
        "$recursiveAnchor": True,
        "id": "x",
        "$defs": {"a": {"not": {}}},
        "definitions": {"a": 5},
    },
    **{
        "nullable": True,
        "discriminator": {},
        "xml": {},
        "example": 5,
        "x-guidance": {"lenient": True},
        "divisibleBy": 3,
    },
    **{"then": False, "else": False, "minContains": 5, "maxContains": 0, "additionalItems": False, "extends": 5},
    **{"uniqueItems": False, "propertyNames": True, "unevaluatedProperties": True, "dependencies": {}},
}
"""Keywords that assert nothing, alone or with such a value."""


@pytest.mark.parametrize("keyword", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_keyword_and_place(keyword: str) -> None:
    schema = {keyword: VALUES.get(keyword, {"type": "null"}), **WITH.get(keyword, {})}
    error = refusal(json={"properties": {"a": {"items": schema}}})
    assert error.param == "json"
    named = {keyword, *WITH.get(keyword, ())}
    assert any(f"properties.a.items.{each}: {each} is not supported: " in str(error) for each in named)


@pytest.mark.parametrize("keyword", IGNORED)
def test_what_asserts_nothing_changes_nothing(keyword: str) -> None:
    schema = {"type": ["integer", "array", "object"], keyword: IGNORED[keyword]}
    assert [takes(text, json=schema) for text in ("5", "[1, 1]", '{"a": 1}', "null")] == [True, True, True, False]


WRONG_SCHEMAS: list[tuple[Any, str]] = [
    ({"properties": []}, "properties must be an object"),
    ({"required": "a"}, "required must be a list"),
    ({"anyOf": {}}, "anyOf must be a list"),
    ({"minLength": -1}, "minLength must be an integer from 0"),
    ({"maxItems": "5"}, "maxItems must be an integer from 0"),
    ({"minimum": "5"}, "minimum must be a number"),
    ({"multipleOf": 0}, "multipleOf must be a number above 0"),
    ({"pattern": 5}, "pattern must be a text"),
    ({"$ref": 5}, "$ref must be a text"),
    ({"items": 5}, "items"),
    ({"$ref": "#/$defs/none"}, "is nowhere in the schema"),
    ({"$ref": "https://example.org/other.json"}, "never fetched"),
    ({"$ref": "file:///etc/passwd"}, "never fetched"),
    ({"format": "regex"}, "format 'regex' is not supported"),
    ({"const": 1.5e300}, "numbers beyond ±2^53"),
    ({"const": 2**53 + 1}, "numbers beyond ±2^53"),
    ({"enum": [[{"a": 2**60}]]}, "numbers beyond ±2^53"),
    ({"minimum": 10**30}, "minimum must be within"),
    ({"type": "object", "minProperties": 2}, "minProperties is above"),
    ({"oneOf": [{"multipleOf": 3}, {"multipleOf": 5}]}, "a value may fit both option 0 and option 1"),
    ({"oneOf": [{"anyOf": [{"minimum": n}] * 40} for n in range(99)]}, "may fit both"),
    (
        {"oneOf": [{"type": "object", "properties": {"a": {"const": n}, "b": {"const": n}}} for n in range(300)]},
        "too many",
    ),
]


@pytest.mark.parametrize(("schema", "message"), WRONG_SCHEMAS)
def test_wrong_schemas_are_refused(schema: Any, message: str) -> None:
    assert message in str(refusal(json=schema))


def nested(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"json": nested(MAX_DEPTH + 1)}, "levels"),
        ({"json": nested(3000)}, "nested too deeply"),
        ({"json": '{"items":' * 20_000 + "{}" + "}" * 20_000}, "nested too deeply"),
        ({"json": " " * (MAX_TEXT_BYTES + 1)}, "at most 262144"),
        ({"json": {"description": "x" * MAX_TEXT_BYTES}}, "at most 262144"),
        ({"json": {"const": 5}, "whitespace_pattern": "a" * (MAX_REGEX_BYTES + 1)}, "at most 16384"),
        ({"regex": "a" * (MAX_REGEX_BYTES + 1)}, "at most 16384"),
        ({"regex": "é" * (MAX_REGEX_BYTES // 2 + 1)}, "at most 16384"),
        ({"choice": ["a" * MAX_TEXT_BYTES, "b"]}, "at most 262144"),
        ({"grammar": "start: a" + " " * MAX_TEXT_BYTES}, "at most 262144"),
        ({"grammar": "root ::= " + "(" * 20_000}, "nested too deeply"),
        ({"json": '{"const": NaN}'}, "no value of JSON"),
        ({"structural_tag": {"format": "x"}}, "an object"),
    ],
)
def test_what_is_too_large_is_refused(asked: dict[str, Any], message: str) -> None:
    assert message in str(refusal(**asked))


@pytest.mark.parametrize(
    ("options", "fits", "fits_not"),
    [
        ([{"format": "ipv4"}, {"format": "ipv6"}], ['"1.2.3.4"', '"::1"'], ['"x"']),
        ([{"format": "date"}, {"format": "date-time"}], ['"2024-02-29"'], ['"2023-02-29"']),
        ([{"enum": ["auto"]}, {"pattern": "^[0-9]+$"}], ['"auto"', '"77"'], ['"x"']),
    ],
)
def test_one_of_texts(options: list[Any], fits: list[str], fits_not: list[str]) -> None:
    schema = {"oneOf": [{"type": "string", **option} for option in options]}
    assert [takes(text, json=schema) for text in (*fits, *fits_not)] == [True] * len(fits) + [False] * len(fits_not)


REQUIRES = {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c", "d"]}]}
TAGGED = {"oneOf": [{"type": "object", "properties": {"k": {"const": value}}} for value in (1, 2)]}


@pytest.mark.parametrize(
    ("schema", "fits", "fits_not"),
    [
        (REQUIRES, ['{"a":1}', '{"b":1}', '{"c":1,"d":1}', '{"a":1,"x":1}'], ["{}", '{"a":1,"b":1}', '{"b":1,"a":1}']),
        (REQUIRES, ['{"a":1,"d":1}'], ['{"b":1,"c":1,"d":1}']),
        (TAGGED, ['{"k":1}', '{"k":2,"x":1}'], ["{}", '{"x":1}', "5", '{"k":3}']),
    ],
)
def test_one_of_objects(schema: Any, fits: list[str], fits_not: list[str]) -> None:
    assert [takes(text, json=schema) for text in (*fits, *fits_not)] == [True] * len(fits) + [False] * len(fits_not)
    kind = Draft202012Validator(schema)
    assert all(kind.is_valid(json.loads(text)) for text in fits)


def test_names_are_not_written_in_two_ways() -> None:
    """`"\\u0061"` is `"a"`: an open object must not take it for an additional property."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    assert takes('{"a": 1, "b": "x"}', json=schema)
    assert not takes('{"a": 1, "\\u0061": "x"}', json=schema)
    assert takes('"\\u0061\\u00e9"', json={"type": "string", "maxLength": 2})


IDENTIFIED = {
    "$id": "https://example.org/a/root.json",
    "$defs": {
        "first": {"enum": [{"$anchor": "x", "$id": "https://example.org/a/sub/y.json"}]},
        "x": {"$anchor": "x", "type": "integer"},
        "y": {"$id": "sub/y.json", "type": "array", "items": {"$ref": "z.json"}},
        "z": {"$id": "sub/z.json", "$ref": "#/$defs/w", "$defs": {"w": {"type": "boolean"}}},
        "u": {"$id": "urn:uuid:1", "items": {"$ref": "#/$defs/v"}, "type": "array", "$defs": {"v": {"type": "null"}}},
        "d": {"$dynamicAnchor": "d", "const": "d"},
    },
}
DRAFT_7 = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$id": "https://example.org/a/",
    "definitions": {
        "other": {"$id": "https://example.org/b/x.json", "type": "string"},
        "x": {"$id": "x.json", "type": "integer"},
    },
    "allOf": [{"$id": "https://example.org/b/", "$ref": "x.json"}],
}
DRAFT_4 = {
    "$schema": "http://json-schema.org/draft-04/schema#",
    "id": "https://example.org/a/",
    "definitions": {"x": {"id": "#x", "type": "integer"}},
    "allOf": [{"$ref": "#x"}],
}
ANY = {"type": "array", "items": {"type": "integer"}, "contains": {}}
LISTED = {"items": [{"type": "string"}], "unevaluatedItems": False, "type": "array"}
MEANINGS: list[tuple[Any, list[str], list[str]]] = [
    ({**IDENTIFIED, "$ref": "#x"}, ["5"], ["{}", "[true]"]),
    ({**IDENTIFIED, "$ref": "sub/y.json"}, ["[true]"], ["[5]", "5"]),
    ({**IDENTIFIED, "$ref": "urn:uuid:1"}, ["[null]"], ["[5]"]),
    ({**IDENTIFIED, "$ref": "#d"}, ['"d"'], ["5"]),
    (DRAFT_7, ["5"], ['"a"']),
    (DRAFT_4, ["5"], ['"a"']),
    (ANY, ["[1]"], ["[]", '["a"]']),
    ({**ANY, "minContains": 2, "maxContains": 3, "minItems": 1}, ["[1, 2]"], ["[1]", "[1, 2, 3, 4]"]),
    ({**ANY, "minContains": 0}, ["[]"], ['["a"]']),
    (LISTED, ['["a"]'], ['["a", "b"]']),
    ({"type": "string", "pattern": '^[^"]*$'}, ['"a b"', '"a\\\\b"'], ['"a\\"b"']),
    ({"type": "string", "pattern": '^[^"\\\\]*$'}, ['"a b"', '"a\\tb"'], ['"a\\"b"', '"a\\\\b"']),
]


@pytest.mark.parametrize(("schema", "fits", "fits_not"), MEANINGS)
def test_what_keywords_mean(schema: Any, fits: list[str], fits_not: list[str]) -> None:
    assert [text for text in (*fits, *fits_not) if takes(text, json=schema)] == fits


def test_bounds_are_exact_where_floats_are_not() -> None:
    for bound in (2**53 + 1, 2**56 + 1):
        at_least, at_most = ({"type": "integer", name: bound} for name in ("minimum", "maximum"))
        assert not takes(str(bound - 1), json=at_least)
        assert not takes(str(bound + 1), json=at_most)
        assert takes(str(bound * 2), json=at_least)
        assert takes(str(bound // 2), json=at_most)


def test_white_space_is_bounded() -> None:
    spaced = '{\n\t"a": [1,\r\n 2]\n}'
    assert takes(spaced, json_object=True)
    for text in ('{  "a":1}', '{"a":\n\n1}', '\n{"a":1}', '{"a":1}\n', "{" + "\n" + " " * 33 + "}"):
        assert not takes(text, json_object=True)
    assert takes('{"a":  1}', json={}, whitespace_pattern=" {0,2}")
    assert not takes('{"a": 1}', json={}, disable_any_whitespace=True)


# -- regular expressions

SAME = [
    "a|bc",
    "(a|b)*c?",
    "[^a-c]{2}",
    "\\d\\w\\s",
    "\\D\\W\\S",
    "[\\d\\s]{2}",
    "[^\\d\\s]{2}",
    "[\\[a&~-]{2}",
    "a{,2}b",
    "a{x}",
]
SAME += [
    "\\(\\)\\[\\]\\{\\}",
    "(?:a|b)c",
    "(?P<n>a)b",
    "(?i:ab)",
    "a+?b*?",
    "\\x41\\u0042",
    "\\t\\n",
    "[\\b]",
    "/\\/",
    "[^\\W]",
    "[]a]",
    "\\D+\\W+",
    "[\\s]?x{2}\\x41+",
    '[^"b]+',
    "[^\\\\]*",
]

SIGNS = "abcABx1 _-.[]{}()&~^/\\\t\n\x08é٣½²　\u2028"


@pytest.mark.parametrize(
    "regex", ["\\d", "\\D", "\\w", "\\W", "\\s", "\\S", "[^\\d]", "[^\\D]", "[^\\w]", "[^\\W]", "[^\\s]", "[^\\S]"]
)
def test_classes_take_what_python_takes(regex: str) -> None:
    taken = [sign for sign in f"{SIGNS}\x1c" if takes(sign, regex=regex)]
    assert taken
    assert all(re.fullmatch(regex, sign) for sign in taken)


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
    (
        {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL]},
        ["", "a", 'a <f=a>{"a":1}</f>', '<f=a>{"a":1}</f>b<f=a>{"a":2}</f>'],
        ["<f=b>", "a<f=a>{}"],
    ),
    (
        {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL], "at_least_one": True, "stop_after_first": True},
        ['a<f=a>{"a":1}</f>'],
        ["", "a", '<f=a>{"a":1}</f>b'],
    ),
    (
        {"type": "tags_with_separator", "tags": [CALL], "separator": ","},
        ["", '<f=a>{"a":1}</f>,<f=a>{"a":1}</f>'],
        ['<f=a>{"a":1}</f>,'],
    ),
    (
        {
            "type": "tags_with_separator",
            "tags": [CALL],
            "separator": "",
            "at_least_one": True,
            "stop_after_first": True,
        },
        ['<f=a>{"a":1}</f>'],
        ["", '<f=a>{"a":1}</f><f=a>{"a":1}</f>'],
    ),
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
    assert [takes(text, structural_tag=tag) for text in (*fits, *fits_not)] == [True] * len(fits) + [False] * len(
        fits_not
    )
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
        ({"type": "triggered_tags", "triggers": ["<g"], "tags": [CALL]}, "exactly one of the triggers"),
        ({"type": "repeat", "min": 2, "max": 1, "content": CALL}, "integers from 0"),
        ({"type": "or", "elements": []}, "not empty"),
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
    text = grammar_text(StructuredOutputsParams(**asked), not_begun, special={"<think>": 6, "</think>": 7})
    assert "<[6]>" in text
    assert "<[7]>" in text
