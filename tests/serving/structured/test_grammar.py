"""From what a user asks for to a grammar: keywords of JSON Schema, `oneOf`, sizes and white space."""

import json
from collections.abc import Mapping
from decimal import Decimal
from itertools import product
from typing import Any

import pytest
from forms import refusal, taker, takes
from jsonschema import Draft202012Validator

from serving.structured.limits import MAX_DEPTH, MAX_REGEX_BYTES, MAX_TEXT_BYTES
from serving.structured.schema import REFUSED

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
    **dict.fromkeys(("title", "description", "$comment", "contentMediaType", "contentEncoding", "id"), "x"),
    **dict.fromkeys(("readOnly", "writeOnly", "deprecated", "nullable", "$recursiveAnchor"), True),
    **dict.fromkeys(("propertyNames", "unevaluatedProperties"), True),
    **dict.fromkeys(("then", "else", "additionalItems", "uniqueItems"), False),
    **dict.fromkeys(("default", "example", "minContains", "extends"), 5),
    **{name: {} for name in ("$vocabulary", "discriminator", "xml", "dependencies")},
    **{"$schema": "https://example.org/x", "$id": "https://example.org/a", "$anchor": "a", "$dynamicAnchor": "a"},
    **{"$defs": {"a": {"not": {}}}, "definitions": {"a": 5}, "contentSchema": {"not": {}}, "examples": [5]},
    **{"x-guidance": {"lenient": True}, "divisibleBy": 3, "maxContains": 0},
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


def obj(required: str = "", /, closed: bool = False, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        **({"additionalProperties": False} if closed else {}),
    }


WRONG_SCHEMAS: list[tuple[Any, str]] = [
    ({"properties": []}, "properties must be an object"),
    ({"required": "a"}, "required must be a list"),
    ({"anyOf": {}}, "anyOf must be a list"),
    ({"minLength": -1}, "minLength must be an integer from 0"),
    ({"maxItems": "5"}, "maxItems must be an integer from 0"),
    ({"minimum": "5"}, "minimum must be a number"),
    ({"multipleOf": 0}, "multipleOf must be a number above 0"),
    ({"multipleOf": 0.1}, "multipleOf: 0.1 is not supported without a minimum and a maximum"),
    ({"multipleOf": 0.01, "minimum": 0}, "use an integer of the smaller unit"),
    ({"items": {"multipleOf": 0.01, "minimum": 0, "maximum": 101}}, "items.multipleOf: 0.01 is not supported"),
    ({"prefixItems": [{"multipleOf": 0.01, "minimum": 0, "maximum": 60}] * 2}, "at most 10,001 multiples"),
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
    ({"oneOf": [{"anyOf": [{"minimum": n}] * 40} for n in range(99)]}, "too many"),
    ({"oneOf": [{"type": "string", "pattern": each} for each in ("a", "b")]}, "may fit both option 0 and option 1"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "may fit both"),
    ({"oneOf": [{"type": "string"}, {"type": "string", "format": "date"}]}, "may fit both"),
    ({"oneOf": [obj(a={}), obj(closed=True, a={})]}, "may fit both"),
    ({"oneOf": [{"type": "array", "items": {"type": each}} for each in ("null", "string")]}, "may fit both"),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {}], "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 30}}}, "too many"),
    ({"oneOf": [{"type": "integer"}, *({"enum": [n, n + 300]} for n in range(200))]}, "too many"),
    (
        {"oneOf": [{"type": "object", "properties": {"a": {"const": n}, "b": {"const": n}}} for n in range(300)]},
        "too many",
    ),
]


@pytest.mark.wide_sample(3)
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
        ({"choice": ["b", "a" * (MAX_REGEX_BYTES + 1)]}, "one choice may have at most 16384"),
        ({"grammar": "start: a" + " " * MAX_TEXT_BYTES}, "at most 262144"),
        ({"grammar": "root ::= " + "(" * 20_000}, "nested too deeply"),
        ({"json": '{"const": NaN}'}, "no value of JSON"),
        ({"structural_tag": {"format": "x"}}, "an object"),
    ],
)
def test_what_is_too_large_is_refused(asked: dict[str, Any], message: str) -> None:
    assert message in str(refusal(**asked))


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
    assert [text for text in (*fits, *fits_not) if takes(text, json=schema)] == fits
    kind = Draft202012Validator(schema)
    assert all(kind.is_valid(json.loads(text)) for text in fits)


INT, TEXT = {"type": "integer"}, {"type": "string"}
MEMBERS = [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {"a": "x"}, {"a": 1, "b": "x"}, {"a": 1, "b": 1, "c": 1}, {"c": 1}]
NUMBERS = [-7, 0, 2.5, 4, 5, 5.5, 7, 10, 12, 99]
TEXTS = ["", "a", "au", "auto", "autos", "b", "none", "é", "]", "n-^\\"]
OVERLAPS: list[tuple[list[Any], list[Any], bool]] = [
    ([{"type": "number", "minimum": 0, "maximum": 7}, {"type": "number", "minimum": 4, "maximum": 10}], NUMBERS, True),
    ([{"type": "integer", "maximum": 5}, {"type": "integer", "exclusiveMinimum": 2}], NUMBERS, True),
    ([{"type": "integer"}, {"enum": [0, 5, 7]}], NUMBERS, True),
    ([{"type": "number"}, {"type": "number", "minimum": 5}, {"type": "number", "minimum": 10}], NUMBERS, True),
    ([{"enum": ["auto", "none", "]", "n-^\\"]}, {"type": "string"}], TEXTS, True),
    ([{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 1}], TEXTS, True),
    ([{"type": "string"}, {"enum": ["a", 5]}, {"const": "b"}], [*TEXTS, 5], True),
    ([{"type": ["string", "null"]}, {"type": ["null", "integer"]}], [None, "a", 5, True], True),
    ([{"const": True}, {"type": "boolean"}], [True, False, None], True),
    ([{"type": "array", "minItems": 1}, {"type": "array", "maxItems": 2}], [[], [1], [1, 2], [1, 2, 3]], True),
    ([obj("a", a=INT), obj("a b", a=INT, b=INT)], MEMBERS, True),
    ([obj(closed=True, a=INT), obj(closed=True, b=INT)], MEMBERS, True),
    ([obj("b", a=INT), obj(closed=True, a=INT)], MEMBERS, True),
    ([obj("a", closed=True, a=INT), obj("a", closed=True, a=INT, b=INT)], MEMBERS, True),
    ([obj(a=INT), obj(a=TEXT)], MEMBERS, True),
    ([obj(a=INT, b=INT), obj(a=INT, b=TEXT)], MEMBERS, True),
    ([obj(a={"type": "integer", "minimum": 1}), obj(a={"type": "integer", "maximum": 1})], [*MEMBERS, {"a": 0}], True),
    ([{"allOf": [{"type": "integer", "minimum": 0}]}, {"anyOf": [TEXT, {"const": 5}]}], [*NUMBERS, *TEXTS], True),
    ([{"oneOf": [{**INT, "maximum": 3}, {**INT, "minimum": 1}]}, {**INT, "maximum": 6}], NUMBERS, False),
    ([{"$ref": "#/$defs/n"}, {"type": "integer", "minimum": 5}], NUMBERS, False),
]


@pytest.mark.parametrize(("options", "values", "exact"), OVERLAPS)
def test_of_options_that_overlap_exactly_one_fits(options: list[Any], values: list[Any], exact: bool) -> None:
    """What fits two is never written. `exact`: all that fits one is."""
    schema = {"$defs": {"n": {"type": "number", "maximum": 10}}, "oneOf": options}
    kind, taken = Draft202012Validator(schema), taker(json=schema)
    found = [value for value in values if taken(json.dumps(value, ensure_ascii=False))]
    right = [value for value in values if kind.is_valid(value)]
    assert found == right if exact else found and all(value in right for value in found)


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
    *(
        ({"oneOf": [{"type": "string", **option} for option in options]}, fits, fits_not)
        for options, fits, fits_not in (
            ([{"format": "ipv4"}, {"format": "ipv6"}], ['"1.2.3.4"', '"::1"'], ['"x"']),
            ([{"format": "date"}, {"format": "date-time"}], ['"2024-02-29"'], ['"2023-02-29"']),
            ([{"enum": ["auto"]}, {"pattern": "^[0-9]+$"}], ['"auto"', '"77"'], ['"x"']),
        )
    ),
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


ENDS = [None, -2.25, -2, -0.5, 0, 0.05, 0.5, 1, 1.125, 2.25]


@pytest.mark.wide_sample(3)
@pytest.mark.parametrize("low", ENDS)
def test_ranges_are_what_they_say(low: float | None) -> None:
    """The library takes 0 where `exclusiveMinimum` is 0 and `maximum` below 1, and no 2.2 where `maximum` is 2.25."""
    numbers = [*(count / 8 for count in range(-20, 21)), 0.01, 0.04, 0.06, 1.1, 1.12, 2.2, 2.3, -0.0]
    texts = {text for number in numbers for text in (f"{number:g}", f"{number:.3f}")}
    for high in ENDS:
        for least, most in product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            bounds = {name: end for name, end in ((least, low), (most, high)) if end is not None}
            schema = {"type": "number", **bounds}
            kind = Draft202012Validator(schema)
            right = {text for text in texts if kind.is_valid(json.loads(text))}
            if right:
                found = {*filter(taker(json=schema), texts)}
                assert found <= right, bounds
                assert found >= {f"{float(text):g}" for text in right} - {"-0"}, bounds


STEPS = [0.1, 0.01, 0.3, 0.001, 0.07, 0.0005, 1.1, 33.3, 0.5, 1.5, 0.125, 2.0, 7]
BOUNDED = {"minimum": -1.25, "exclusiveMaximum": 2.5}


@pytest.mark.parametrize("step", STEPS)
def test_multiples_are_those_of_jsonschema(step: float) -> None:
    """Exactly those, of the numbers without needless digits: floats make some right ones wrong (0.3 / 0.1)."""
    digits = max(0, -Decimal(str(step)).normalize().as_tuple().exponent)
    texts = {f"{Decimal(str(step)) * count:.{digits}f}" for count in range(-40, 60)}
    texts |= {"0.3", "0.35", "2.5", "-1.2", "1"}
    texts = {text.rstrip("0").rstrip(".") if "." in text else text for text in texts}
    for type_ in ("number", "integer"):
        schema = {"type": type_, "multipleOf": step, **BOUNDED}
        kind, taken = Draft202012Validator(schema), taker(json=schema)
        for text in texts - {"-0"}:
            assert taken(text) == kind.is_valid(json.loads(text)), text


def test_multiples_beside_other_keywords() -> None:
    listed = {"multipleOf": 0.1, "enum": [0.3, 0.5, "x"]}
    assert [text for text in ("0.3", "0.5", '"x"') if takes(text, json=listed)] == ["0.5", '"x"']
    schema = {"type": ["number", "string"], "maxLength": 1, "multipleOf": 0.1, "minimum": 0, "maximum": 1}
    assert [text for text in ("0.2", "0.3", "2", '"a"', '"ab"', "null") if takes(text, json=schema)] == ["0.2", '"a"']
    small = {"type": "number", "multipleOf": 1e-5, "minimum": 0, "maximum": 0.0001}
    assert [text for text in ("0.00002", "0.00007", "0", "0.00015") if takes(text, json=small)] == ["0.00002", "0"]
    apart = {"multipleOf": 0.1, "minimum": 0, "maximum": 1}, {"multipleOf": 0.1, "minimum": 2, "maximum": 3}
    assert takes("2.2", json={"oneOf": [{"type": "number", **each} for each in apart]})


def test_multiples_are_no_longer_than_floats_are_exact() -> None:
    for text in ("9007199254740993", "-9007199254740992.5", f"{'1' * 400}.5"):
        assert not takes(text, json={"type": "number", "multipleOf": 1.5}), text
    assert takes("1" * 400, json={"type": "integer", "multipleOf": 1})


def test_white_space_is_bounded() -> None:
    spaced = '{\n\t"a": [1,\r\n 2]\n}'
    assert takes(spaced, json_object=True)
    for text in ('{  "a":1}', '{"a":\n\n1}', '\n{"a":1}', '{"a":1}\n', "{" + "\n" + " " * 33 + "}"):
        assert not takes(text, json_object=True)
    assert takes('{"a":  1}', json={}, whitespace_pattern=" {0,2}")
    assert not takes('{"a": 1}', json={}, disable_any_whitespace=True)
