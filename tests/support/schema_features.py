"""JSON schemas by feature. `examples` beside a pattern are texts that match it, for the generator of documents."""

from collections.abc import Mapping
from typing import Any


def open_object(required: str = "", /, **properties: Any) -> dict[str, Any]:
    """An object; `required` has the names of its required properties, or `*` for all."""
    names = list(properties) if required == "*" else required.split()
    return {"type": "object", "properties": properties, "required": names}


def _object(required: str = "", /, **properties: Any) -> dict[str, Any]:
    """A closed one."""
    return {**open_object(required, **properties), "additionalProperties": False}


def by_pattern(patterns: Mapping[str, Any], *examples: Any, **more: Any) -> dict[str, Any]:
    """An object whose properties have these names."""
    closed = {"patternProperties": patterns, "additionalProperties": False}
    return {"type": "object", **closed, "examples": list(examples), **more}


def _list(items: Any, **limits: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


def places(*items: Any, **more: Any) -> dict[str, Any]:
    """A list whose first items have schemas of their own."""
    return {"type": "array", "prefixItems": list(items), **more}


def _text(pattern: str, *examples: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern, "examples": list(examples)}


def formatted(name: str, *examples: str) -> dict[str, Any]:
    return {"type": "string", "format": name, "examples": list(examples)}


def whole(low: float, high: float, **more: Any) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high, **more}


def number(low: float, high: float, **more: Any) -> dict[str, Any]:
    return {**whole(low, high, **more), "type": "number"}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


def defined(name: str, schema: Any) -> dict[str, Any]:
    """A schema that may refer to itself."""
    return {"$defs": {name: schema}, **ref(name)}


INT, NUM, STR, BOOL, NULL = ({"type": name} for name in ("integer", "number", "string", "boolean", "null"))
SHORT = {"type": "string", "maxLength": 6}
DIGIT = whole(0, 9)
_TREE = _object("value children", value=DIGIT, children=_list(ref("tree"), maxItems=2))
_CHAIN = _object("*", n=DIGIT, next={"anyOf": [{"$ref": "#"}, NULL]})
_DRAFT_7, _DRAFT_4 = "http://json-schema.org/draft-07/schema#", "http://json-schema.org/draft-04/schema#"
_DRAFT_2019, _DRAFT_2020 = (f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12"))
_SHAPE = [
    _object("*", kind={"const": kind}, **{size: whole(1, 99)})
    for kind, size in (("circle", "radius"), ("square", "side"))
]
_DEFINITION = {"$ref": "#/definitions/d"}

FEATURES: Mapping[str, Any] = {
    # types
    "type null": NULL,
    "type boolean": BOOL,
    "type integer": INT,
    "type number": NUM,
    "type string": STR,
    "type array": {"type": "array"},
    "type object": {"type": "object"},
    "type list": {"type": ["integer", "null"]},
    "type list of three": {"type": ["string", "boolean", "null"], "maxLength": 5},
    "type list with object": {**open_object("*", a=INT), "type": ["object", "string"], "maxLength": 3},
    "type nullable in object": _object("*", a={"type": ["string", "null"], "maxLength": 4}),
    "boolean true": True,
    "boolean empty": {},
    "boolean only annotations": {"title": "Anything", "description": "at all", "default": 5, "examples": [1]},
    "boolean property true": _object("*", a=True),
    "boolean property false": open_object("b", a=False, b=DIGIT),
    "boolean items false": places(DIGIT, BOOL, items=False),
    # const, enum
    "const text": {"const": "yes"},
    "const number": {"const": 3.25},
    "const integer": {"const": -17},
    "const null": {"const": None},
    "const boolean": {"const": False},
    "const list": {"const": [1, "a", None, {"b": [True]}]},
    "const object": {"const": {"a": 1, "b": {"c": "d"}}},
    "const empty": {"const": {}},
    "const with escapes": {"const": 'a"b\\c\nd\te/f'},
    "const unicode": {"const": "naïve ☕ 漢字 😀"},
    "enum texts": {"enum": ["red", "green", "blue"]},
    "enum prefixes": {"enum": ["a", "ab", "abc", ""]},
    "enum mixed": {"enum": [1, "1", None, True, [1], {"a": 1}, 1.5]},
    "enum with type": {"type": "string", "enum": ["a", "b", 5, None]},
    "enum integers": {"type": "integer", "enum": [1, 10, 100, -5]},
    "enum unicode": {"enum": ["ä", "ö", "日本", "日本語", "🙂"]},
    "enum escapes": {"enum": ['"', "\\", "\n", "/", "a\tb", "\u0001x"]},
    "enum one": {"enum": ["only"]},
    "enum large": {"enum": [f"item-{number:04}" for number in range(1000)]},
    "enum large of numbers": {"enum": [number * 37 for number in range(500)]},
    "enum and maximum": {"enum": [1, 5, 9, 12], "maximum": 9},
    # numbers
    "integer range": whole(3, 17),
    "integer negative range": whole(-250, -3),
    "integer exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "integer fractional bounds": whole(0.5, 3.5),
    "integer one value": whole(7, 7),
    "integer at least": {"type": "integer", "minimum": 1000},
    "integer at most": {"type": "integer", "maximum": -1},
    "integer of 32 bits": whole(-(2**31), 2**31 - 1, format="int32"),
    "integer of 64 bits": whole(-(2**63), 2**63 - 1, format="int64"),
    "integer unsigned": whole(0, 2**64 - 1, format="uint64"),
    "integer multiple": {"type": "integer", "multipleOf": 7},
    "integer multiple in range": whole(100, 1000, multipleOf=25),
    "number range": number(-1.5, 2.25),
    "number unit": number(0, 1),
    "number exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "number positive": {"type": "number", "exclusiveMinimum": 0},
    "number multiple": {"type": "number", "multipleOf": 0.5},
    "number multiple in range": number(0, 10, multipleOf=0.25),
    "number multiple of decimals": number(0, 5, multipleOf=0.1),
    "number multiple in cents": _object("*", price=number(0, 99.99, multipleOf=0.01)),
    "number multiple nullable": {
        "type": ["number", "null"],
        "multipleOf": 0.05,
        "exclusiveMinimum": -1,
        "exclusiveMaximum": 1,
    },
    "number multiple of 1.5": {"type": "number", "multipleOf": 1.5},
    "number latitude": _object("*", lat=number(-90, 90), lon=number(-180, 180)),
    "number bounds without type": {"minimum": 5, "maxLength": 2, "maxItems": 1, "maxProperties": 1},
    "number draft 4 exclusive": {"$schema": _DRAFT_4, **whole(0, 20, exclusiveMinimum=True)},
    # strings
    "string at most": {"type": "string", "maxLength": 5},
    "string at least": {"type": "string", "minLength": 3},
    "string length": {"type": "string", "minLength": 2, "maxLength": 4},
    "string exact length": {"type": "string", "minLength": 3, "maxLength": 3},
    "string empty": {"type": "string", "maxLength": 0},
    "string long": {"type": "string", "minLength": 40, "maxLength": 60},
    "string pattern": _text("^[a-z]{2,4}$", "ab", "xyz", "abcd"),
    "string pattern anywhere": _text("[0-9]{2}", "a12", "99", "x 07 y"),
    "string pattern at the end": _text("\\.txt$", "a.txt", ".txt", "notes.txt"),
    "string pattern alternatives": _text("^(cat|dog|bird)s?$", "cat", "dogs", "bird"),
    "string pattern phone": _text("^\\+?[1-9]\\d{6,14}$", "+491701234567", "1234567", "98765432101"),
    "string pattern zip": _text("^\\d{5}(-\\d{4})?$", "12345", "12345-6789"),
    "string pattern semver": _text("^v?(0|[1-9]\\d*)\\.(0|[1-9]\\d*)\\.(0|[1-9]\\d*)$", "1.2.3", "v0.10.0"),
    "string pattern hex": _text("^#(?:[0-9a-fA-F]{3}){1,2}$", "#fff", "#00FF7f"),
    "string pattern words": _text("^\\w+( \\w+){0,3}$", "a", "one two", "x_1 y 2 z"),
    "string pattern negated class": _text("^[^\\s\\d]{1,5}$", "ab", "é!", "~"),
    "string pattern not a word": _text("^\\W\\D\\S$", "-a!", "  ."),
    "string pattern unicode": _text("^[À-ÿ]\\S[一-龥]?$", "Àb", "ÿé漢"),
    "string pattern escapes": _text('^"\\\\\\[\\]\\{\\}\\/\\.$', '"\\[]{}/.'),
    "string pattern signs in class": _text("^[\\[\\]&~^|-]+$", "[]", "&&", "-~|^"),
    "string pattern braces": _text("^a{b}c{,2}$", "a{b}", "a{b}cc"),
    "string pattern lazy": _text("^<.{1,5}?>$", "<a>", "<abcde>"),
    "string pattern groups": _text("^(?P<y>\\d{4})-(?:0[1-9]|1[0-2])$", "2024-01", "1999-12"),
    "string pattern case": _text("^(?i:yes|no)$", "YES", "No", "yes"),
    "string pattern and length": _text("^[ab]*$", "abab", "aaa") | {"minLength": 3, "maxLength": 6},
    "string pattern and format": _text("^20", "2024-02-29", "2001-01-01") | {"format": "date"},
    "string newline": _text("^a\\nb\\t$", "a\nb\t"),
    # formats
    "format date": formatted("date", "2024-02-29", "1999-12-31", "2001-04-30"),
    "format date-time": formatted("date-time", "2024-02-29T12:00:00Z", "1999-01-31t23:59:59.5+02:00"),
    "format time": formatted("time", "12:00:00Z", "23:59:59.123-01:30"),
    "format duration": formatted("duration", "P1D", "PT5M", "P2W", "P1Y2M3DT4H5M6S"),
    "format email": formatted("email", "a@b.de", "x.y+z@example.org"),
    "format hostname": formatted("hostname", "a", "example.org", "a-b.c"),
    "format ipv4": formatted("ipv4", "1.2.3.4", "255.0.0.10"),
    "format ipv6": formatted("ipv6", "::1", "2001:db8::ff00:42:8329"),
    "format uuid": formatted("uuid", "123e4567-e89b-12d3-a456-426614174000"),
    "format uri": formatted("uri", "http://a.de/b?c=d#e", "mailto:a@b.c"),
    "format uri-reference": formatted("uri-reference", "../a/b", "#x", "http://a.de/"),
    "format uri-template": formatted("uri-template", "/a/{b}", "/q{?x,y*}", "plain"),
    "format json-pointer": formatted("json-pointer", "", "/a/b~1c/0"),
    "format relative-json-pointer": formatted("relative-json-pointer", "0", "1/a", "2#"),
    "format unknown": {"type": "string", "format": "password", "maxLength": 8},
    "format without type": {"format": "ipv4", "maxItems": 1, "maxProperties": 1, "examples": ["1.2.3.4", 5, None]},
    "format in object": _object(
        "*",
        id=formatted("uuid", "123e4567-e89b-12d3-a456-426614174000"),
        day=formatted("date", "2024-02-29", "2023-02-28"),
    ),
    # arrays
    "array items": _list(DIGIT),
    "array bounded": _list(DIGIT, minItems=2, maxItems=4),
    "array at most": _list(BOOL, maxItems=3),
    "array at least": _list(NULL, minItems=3),
    "array exact": _list({"enum": ["x", "y"]}, minItems=2, maxItems=2),
    "array empty": {"type": "array", "maxItems": 0},
    "array long": _list({"const": 0}, minItems=40, maxItems=50),
    "array tuple": places(DIGIT, SHORT, BOOL, minItems=3, items=False),
    "array tuple and rest": places({"const": "head"}, items=DIGIT, minItems=1, maxItems=4),
    "array tuple open": places(DIGIT, BOOL, maxItems=3),
    "array draft 7 tuple": {"$schema": _DRAFT_7, **_list([DIGIT, BOOL], additionalItems=False)},
    "array draft 7 tuple and rest": {"$schema": _DRAFT_7, **_list([DIGIT], additionalItems=BOOL, maxItems=3)},
    "array of arrays": _list(_list(DIGIT, maxItems=2), maxItems=3),
    "array of objects": _list(_object("*", a=DIGIT, b=BOOL), maxItems=2),
    "array of alternatives": _list({"anyOf": [DIGIT, {"type": "string", "maxLength": 2}, NULL]}, maxItems=4),
    "array not unique": _list(DIGIT, uniqueItems=False, maxItems=3),
    # objects
    "object required": _object("*", a=DIGIT, b=BOOL),
    "object optional": _object("", a=DIGIT, b=BOOL, c=NULL),
    "object some required": _object("b d", a=DIGIT, b=BOOL, c=NULL, d=DIGIT, e=BOOL),
    "object open": open_object("a", a=DIGIT),
    "object of digits": {"type": "object", "additionalProperties": DIGIT},
    "object open of digits": {"type": "object", "properties": {"a": BOOL}, "additionalProperties": DIGIT},
    "object required not listed": {**_object("a b", a=DIGIT), "additionalProperties": BOOL},
    "object closed and empty": {"type": "object", "additionalProperties": False},
    "object without type": {"properties": {"a": DIGIT}, "required": ["a"]},
    "object at most two": {"type": "object", "additionalProperties": DIGIT, "maxProperties": 2},
    "object at least one": {"type": "object", "additionalProperties": DIGIT, "minProperties": 1},
    "object one of its properties": {**_object("", a=DIGIT, b=BOOL), "minProperties": 1},
    "object minimum met by required": {**_object("a b", a=DIGIT, b=BOOL, c=NULL), "minProperties": 2},
    "object two of three": {**_object("", a=DIGIT, b=BOOL, c=NULL), "minProperties": 2},
    "object at most two of four": {**_object("a", a=DIGIT, b=BOOL, c=NULL, d=DIGIT), "maxProperties": 2},
    "object unevaluated": {**open_object("a", a=DIGIT), "unevaluatedProperties": False},
    "array unevaluated": places(DIGIT, BOOL, unevaluatedItems=False),
    "object pattern": by_pattern({"^x-[a-z]{1,3}$": DIGIT}, {"x-a": 1}, {"x-ab": 2, "x-z": 3}, {}),
    "object two patterns": by_pattern({"^n": DIGIT, "^b": BOOL}, {"n": 1}, {"b1": True, "n2": 3}, {}),
    "object properties and pattern": by_pattern(
        {"^is_": BOOL}, {"id": 1}, {"id": 2, "is_a": True}, properties={"id": DIGIT}, required=["id"]
    ),
    "object nested": _object("*", a=_object("*", b=_object("*", c=_object("*", d=DIGIT)))),
    "object deep": _object(
        "*", a=_object("*", b=_object("*", c=_list(_object("*", d=_list(DIGIT, maxItems=1)), maxItems=1)))
    ),
    "object many": _object("*", **{f"field_{number}": DIGIT for number in range(30)}),
    "object many optional": _object("", **{f"p{number}": BOOL for number in range(20)}),
    "object unicode names": _object("*", **{"naïve": DIGIT, "漢字": BOOL, "😀": NULL}),
    "object escaped names": _object("*", **{'a"b': DIGIT, "c\\d": BOOL, "e\nf": NULL, "g/h": DIGIT}),
    "object odd names": _object("*", **{"": DIGIT, " ": BOOL, "$ref": DIGIT, "type": NULL, "properties": BOOL}),
    "object prefix names": _object("", a=DIGIT, aa=DIGIT, aaa=DIGIT, ab=DIGIT),
    "object annotations": {
        **_object("*", a={**DIGIT, "title": "A", "deprecated": True, "readOnly": True, "default": 5}),
        **{"$comment": "x", "x-order": 5, "nullable": True, "example": {}},
    },
    # anyOf, allOf, oneOf
    "anyOf scalars": {"anyOf": [DIGIT, BOOL, NULL]},
    "anyOf objects": {"anyOf": _SHAPE},
    "anyOf nullable": _object("*", a={"anyOf": [SHORT, NULL]}),
    "anyOf overlapping": {"anyOf": [whole(5, 20), whole(10, 30)]},
    "anyOf required": {**_object("", a=DIGIT, b=BOOL), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "anyOf with siblings": {"type": "integer", "anyOf": [{"maximum": 3, "minimum": 0}, {"minimum": 10, "maximum": 12}]},
    "anyOf nested": {"anyOf": [{"anyOf": [DIGIT, NULL]}, {"anyOf": [BOOL, {"const": "x"}]}]},
    "allOf two": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    "allOf objects": {
        "type": "object",
        "allOf": [{"properties": {"a": DIGIT}, "required": ["a"]}, {"properties": {"b": BOOL}, "required": ["b"]}],
        "maxProperties": 2,
    },
    "allOf one": {"allOf": [_object("*", a=DIGIT)]},
    "allOf reference": {
        "$defs": {"base": open_object("id", id=DIGIT)},
        "allOf": [ref("base"), _object("n", id=True, n=BOOL)],
    },
    "allOf strings": {
        "type": "string",
        "allOf": [{"minLength": 2}, {"maxLength": 4}, {"pattern": "^[a-c]*$"}],
        "examples": ["ab", "abca"],
    },
    "allOf and anyOf": {"allOf": [{"anyOf": [DIGIT, NULL]}, {"anyOf": [NULL, whole(5, 8)]}]},
    "oneOf types": {"oneOf": [DIGIT, SHORT, NULL]},
    "oneOf ranges": {"oneOf": [whole(0, 5), whole(10, 15)]},
    "oneOf constants": {"oneOf": [{"const": "a", "title": "A"}, {"const": "b"}, {"const": 3}]},
    "oneOf tagged": {"oneOf": _SHAPE},
    "oneOf tagged by reference": {
        "$defs": {"c": _SHAPE[0], "s": _SHAPE[1]},
        "oneOf": [ref("c"), ref("s")],
        "discriminator": {"propertyName": "kind"},
    },
    "oneOf optional tag": {
        "oneOf": [
            _object("v", kind={"const": "n", "default": "n"}, v=DIGIT),
            _object("v", kind={"const": "b"}, v=DIGIT),
        ],
        "examples": [{"kind": "n", "v": 1}, {"kind": "b", "v": 0}],
    },
    "oneOf required": {
        **_object("", a=DIGIT, b=BOOL, c=NULL),
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        "examples": [{"a": 1}, {"b": True, "c": None}],
    },
    "oneOf closed": {"oneOf": [_object("*", a=DIGIT), _object("*", b=DIGIT)]},
    "oneOf lengths": {
        "oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 4, "maxLength": 5}]
    },
    "oneOf one": {"oneOf": [DIGIT]},
    "oneOf in object": _object("*", a={"oneOf": [whole(0, 4), {"enum": ["none", "all"]}]}),
    # references
    "ref defs": {"$defs": {"d": DIGIT}, **_list(ref("d"), maxItems=3)},
    "ref definitions": {"$schema": _DRAFT_7, "definitions": {"d": DIGIT}, **_object("*", a=_DEFINITION, b=_DEFINITION)},
    "ref draft 7 siblings": {
        "$schema": _DRAFT_7,
        "definitions": {"d": DIGIT},
        **_object("*", a={**_DEFINITION, "maximum": 3}),
    },
    "ref siblings": {"$defs": {"d": DIGIT}, **_object("*", a={**ref("d"), "maximum": 3, "description": "small"})},
    "ref to a property": _object("*", a=DIGIT, b={"$ref": "#/properties/a"}),
    "ref chain": {"$defs": {"a": ref("b"), "b": ref("c"), "c": DIGIT}, **ref("a")},
    "ref escaped pointer": {"$defs": {"a/b~c d": DIGIT}, "$ref": "#/$defs/a~1b~0c%20d"},
    "ref anchor": {"$defs": {"x": {"$anchor": "digit", **DIGIT}}, **_list({"$ref": "#digit"}, maxItems=2)},
    "ref id": {
        "$id": "https://example.org/root.json",
        "$defs": {"x": {"$id": "item.json", **DIGIT}},
        **_list({"$ref": "item.json"}, maxItems=2),
    },
    "ref recursive tree": defined("tree", _TREE),
    "ref recursive root": _CHAIN,
    "ref mutually recursive": {"$defs": {"a": _object("", b=ref("b")), "b": _object("", a=ref("a"))}, **ref("a")},
    "ref expression": defined(
        "e", {"anyOf": [DIGIT, _object("*", op={"enum": ["+", "*"]}, left=ref("e"), right=ref("e"))]}
    ),
    "ref unused refused definition": {"$defs": {"unused": {"not": {}}, "d": DIGIT}, **ref("d")},
    # drafts
    "draft 2019": {"$schema": _DRAFT_2019, **_object("*", a=DIGIT)},
    "draft 2020": {"$schema": _DRAFT_2020, **places(DIGIT, maxItems=1)},
    "draft unknown": {"$schema": "https://example.org/mine", **DIGIT},
    "draft 7 unknown prefixItems": {"$schema": _DRAFT_7, **places({"const": "x"}, items=DIGIT, maxItems=2)},
    "then without if": {**DIGIT, "then": {"minimum": 100}, "minContains": 3},
}
