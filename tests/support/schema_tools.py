"""JSON schemas as tools and programs have them: parameters of functions, MCP tools, pydantic's models, OpenAPI's parts.

They are written for the tests, in the manner of such tools.
"""

from collections.abc import Mapping
from typing import Any


def open_object(required: str = "", /, **properties: Any) -> dict[str, Any]:
    """An object; `required` has the names of its required properties, or `*` for all."""
    names = list(properties) if required == "*" else required.split()
    return {"type": "object", "properties": properties, "required": names}


def by_pattern(patterns: Mapping[str, Any], *examples: Any, **more: Any) -> dict[str, Any]:
    """An object whose properties have these names."""
    closed = {"patternProperties": patterns, "additionalProperties": False}
    return {"type": "object", **closed, "examples": list(examples), **more}


def places(*items: Any, **more: Any) -> dict[str, Any]:
    """A list whose first items have schemas of their own."""
    return {"type": "array", "prefixItems": list(items), **more}


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


def _strict(**properties: Any) -> dict[str, Any]:
    return {**open_object("*", **properties), "additionalProperties": False}


def _text(description: str = "", most: int = 12, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, "maxLength": most, **more}


def _count(most: int = 100, least: int = 0, **more: Any) -> dict[str, Any]:
    return whole(least, most, **more)


def _choice(*values: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "enum": list(values), **more}


def _few(items: Any, most: int = 3, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": most, **more}


def _or_null(schema: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """As pydantic writes `X | None = None`."""
    return {"anyOf": [dict(schema), {"type": "null"}], "default": None, **more}


def _pet(kind: str, **rest: Any) -> dict[str, Any]:
    tag = {"const": kind, "default": kind, "title": "Kind", "type": "string"}
    return {"title": kind.title(), **open_object(*rest, kind=tag, **rest)}


_FLAG = {"type": "boolean", "default": False}
_DAY = formatted("date", "2024-02-29", "1999-12-31")
_MOMENT = formatted("date-time", "2024-02-29T12:00:00Z")
_UUID = formatted("uuid", "123e4567-e89b-12d3-a456-426614174000")
_MAIL = formatted("email", "a@b.de", "x.y@example.org")
_URL = formatted("uri", "http://a.de/b", "https://example.org/?q=1")
_PRICE = number(0, 999)
_PLACE = _strict(lat=number(-90, 90), lon=number(-180, 180))
_STEP = _strict(explanation=_text(), output=_text())

TOOLS: Mapping[str, Any] = {
    # parameters of functions
    "weather": open_object("location", location=_text("City and country"), unit=_choice("celsius", "fahrenheit")),
    "weather strict": _strict(location=_text("City"), unit={"type": ["string", "null"], "enum": ["c", "f", None]}),
    "forecast": _strict(place=_PLACE, days=_count(14, 1), hourly=_FLAG),
    "web search": open_object(
        "query", query=_text("What to look for"), num_results=_count(20, 1, default=10), safe=_FLAG
    ),
    "search with filters": _strict(
        query=_text(), filters=_strict(site=_or_null(_text()), after=_or_null(_DAY), language=_choice("en", "de", "ja"))
    ),
    "read file": open_object("path", path=_text("Absolute path"), offset=_count(9999), limit=_count(2000, 1)),
    "write file": _strict(path=_text(), content=_text("May have line ends\n", 30)),
    "edit file": _strict(path=_text(), old_string=_text(), new_string=_text(), replace_all=_FLAG),
    "edit file many": _strict(path=_text(), edits=_few(_strict(old=_text(), new=_text()), minItems=1)),
    "list directory": open_object("path", path=_text(), recursive=_FLAG, ignore=_few(_text("glob"))),
    "grep": open_object(
        "pattern",
        pattern=_text(),
        path=_text(),
        output_mode=_choice("content", "files", "count"),
        **{"-i": _FLAG, "-A": _count(10)},
    ),
    "shell": open_object("command", command=_text(most=40), timeout=_count(600000, 1), run_in_background=_FLAG),
    "python": _strict(code=_text("Code to run", 60)),
    "sql query": _strict(
        statement=_text(most=40), parameters=_few({"type": ["string", "number", "boolean", "null"], "maxLength": 5})
    ),
    "sql builder": _strict(
        table=_choice("users", "orders"),
        columns=_few(_choice("id", "name", "total"), minItems=1),
        where=_few(
            _strict(
                column=_choice("id", "name"), op=_choice("=", "<", ">=", "!="), value={"anyOf": [_text(), _count()]}
            )
        ),
        order=_choice("asc", "desc"),
    ),
    "calendar event": _strict(title=_text(), start=_MOMENT, end=_MOMENT, attendees=_few(_MAIL)),
    "calendar repeat": _strict(
        title=_text(),
        rule={
            "oneOf": [
                _strict(every={"const": "day"}),
                _strict(every={"const": "week"}, on=_few(_choice("mo", "tu", "we"))),
            ]
        },
    ),
    "send mail": open_object(
        "to subject body", to=_few(_MAIL, minItems=1), cc=_few(_MAIL), subject=_text(), body=_text(most=40)
    ),
    "book flight": _strict(
        origin=_text(most=3, pattern="^[A-Z]{3}$", examples=["FRA", "SFO"]),
        destination=_text(most=3, pattern="^[A-Z]{3}$", examples=["HND", "CDG"]),
        date=_DAY,
        passengers=_count(9, 1),
        cabin=_choice("economy", "business", "first"),
    ),
    "transfer money": _strict(
        iban=_text(most=34, pattern="^[A-Z]{2}[0-9]{2}[A-Z0-9]{1,30}$", examples=["DE89370400440532013000"]),
        amount={"type": "number", "exclusiveMinimum": 0, "maximum": 5000},
        currency=_choice("EUR", "USD"),
    ),
    "timer": _strict(duration=formatted("duration", "PT5M", "P1D"), label=_or_null(_text())),
    "unit conversion": _strict(value={"type": "number"}, source=_choice("m", "ft"), target=_choice("m", "ft")),
    "no parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    "no parameters open": {"type": "object", "properties": {}},
    "translate": _strict(
        text=_text(), target=_text(most=5, pattern="^[a-z]{2}(-[A-Z]{2})?$", examples=["de", "pt-BR"])
    ),
    "set lights": _strict(
        room=_choice("kitchen", "hall"),
        color=_text(most=7, pattern="^#[0-9a-f]{6}$", examples=["#00ff7f"]),
        level=_count(),
    ),
    "play music": open_object("", artist=_text(), album=_text(), shuffle=_FLAG, volume=_count()),
    # several calls
    "tool calls": _few(
        {
            "anyOf": [
                _strict(name={"const": "get_weather"}, parameters=_strict(city=_text())),
                _strict(name={"const": "get_time"}, parameters=_strict(zone=_text())),
            ]
        },
        2,
        minItems=1,
    ),
    # MCP
    "mcp fetch": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Fetch",
        **open_object(
            "url",
            url=_URL,
            max_length={"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1000000, "default": 5000},
            raw=_FLAG,
        ),
    },
    "mcp memory": _strict(entities=_few(_strict(name=_text(), entityType=_text(), observations=_few(_text(), 2)), 2)),
    "mcp thinking": open_object(
        "thought nextThoughtNeeded thoughtNumber",
        thought=_text(most=30),
        nextThoughtNeeded={"type": "boolean"},
        thoughtNumber=_count(9, 1),
        isRevision={"type": "boolean"},
    ),
    "mcp browser": _strict(
        action={
            "anyOf": [
                _strict(type={"const": "click"}, ref=_text()),
                _strict(type={"const": "type"}, ref=_text(), text=_text()),
                _strict(type={"const": "back"}),
            ]
        }
    ),
    "mcp allowed headers": _strict(
        headers={"type": "object", "additionalProperties": _text(most=5), "maxProperties": 2}
    ),
    # code hosts
    "issue": _strict(
        owner=_text(),
        repo=_text(most=20, pattern="^[\\w.-]+$", examples=["a.b-c", "repo_1"]),
        title=_text(),
        labels=_few(_text()),
        assignees=_few(_text()),
        milestone=_count(99, 1) | {"type": ["integer", "null"]},
    ),
    "pull request": _strict(
        title=_text(),
        head=_text(),
        base=_choice("main", "dev"),
        draft={"type": "boolean"},
        body={"type": ["string", "null"], "maxLength": 10},
    ),
    "review": _strict(
        event=_choice("APPROVE", "REQUEST_CHANGES", "COMMENT"),
        comments=_few(_strict(path=_text(), line=_count(999, 1), side=_choice("LEFT", "RIGHT"), body=_text()), 2),
    ),
    "commit": _strict(
        sha=_text(most=40, pattern="^[0-9a-f]{7,40}$", examples=["0123abc"]),
        message=_text(),
        parents=_few(_text(most=40, pattern="^[0-9a-f]{7,40}$", examples=["deadbeef"]), 2),
    ),
    # pydantic
    "pydantic user": {
        "title": "User",
        **open_object(
            "name age", name=_text(title="Name"), age=_count(150, title="Age"), email=_or_null(_MAIL, title="Email")
        ),
    },
    "pydantic steps": {
        "$defs": {"Step": {"title": "Step", **_STEP}},
        "title": "MathResponse",
        **_strict(steps=_few(ref("Step"), 2, title="Steps"), final_answer=_text()),
    },
    "pydantic enum": {
        "$defs": {"Color": {"enum": ["red", "green"], "title": "Color", "type": "string"}},
        **_strict(color={"$ref": "#/$defs/Color", "description": "of it"}, other=_or_null(ref("Color"))),
    },
    "pydantic union": {
        "$defs": {"Cat": _pet("cat", lives=_count(9)), "Dog": _pet("dog", tail={"type": "boolean"})},
        **_strict(
            pet={
                "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
                "oneOf": [ref("Cat"), ref("Dog")],
            }
        ),
        "examples": [{"pet": {"kind": "cat", "lives": 7}}, {"pet": {"kind": "dog", "tail": True}}],
    },
    "pydantic tree": defined("Node", {**_strict(value=_count(9), children=_few(ref("Node"), 2)), "title": "Node"}),
    "pydantic tuple": _strict(point=places({"type": "number"}, {"type": "number"}, minItems=2, maxItems=2)),
    "pydantic dict": _strict(scores={"additionalProperties": _count(9), "type": "object", "maxProperties": 2}),
    "pydantic decimal": _strict(
        price={
            "anyOf": [
                number(0, 9),
                {"type": "string", "pattern": "^\\d{1,3}(?:\\.\\d{2})?$", "examples": ["1.50", "20"]},
            ]
        }
    ),
    "pydantic literal": _strict(
        size={"enum": ["s", "m", "l"], "type": "string"}, answer={"const": 42, "type": "integer"}
    ),
    "pydantic dates": _strict(on=_DAY, at=formatted("time", "12:00:00Z"), stamp=_or_null(_MOMENT), id=_UUID),
    "pydantic nested optional": {
        "$defs": {"Address": {**open_object("street", street=_text(), city=_or_null(_text())), "title": "Address"}},
        **open_object("name", name=_text(), address=_or_null(ref("Address"))),
    },
    "pydantic forbid": {
        **open_object("a", a=_count(), b=_or_null(_count())),
        "additionalProperties": False,
        "title": "Closed",
    },
    # OpenAPI
    "openapi pet": open_object(
        "id name",
        id={"type": "integer", "format": "int64", "minimum": 1, "maximum": 10**6},
        name=_text(),
        tag=_text(nullable=True),
        status=_choice("available", "pending", "sold"),
        photo=_few(_text(format="binary", most=4)),
    ),
    "openapi error": _strict(
        code={"type": "integer", "format": "int32", "minimum": 100, "maximum": 599}, message=_text(xml={"name": "m"})
    ),
    "openapi composed": {
        "components": {
            "schemas": {
                "Base": open_object("id", id=_count(99, 1)),
                "Named": {"allOf": [{"$ref": "#/components/schemas/Base"}, open_object("name", name=_text())]},
            }
        },
        "allOf": [{"$ref": "#/components/schemas/Named"}, {"type": "object", "maxProperties": 2}],
    },
    "openapi payment": {
        "oneOf": [
            _strict(
                method={"const": "card"}, number=_text(most=16, pattern="^[0-9]{12,16}$", examples=["4242424242424242"])
            ),
            _strict(method={"const": "sepa"}, iban=_text()),
            _strict(method={"const": "cash"}),
        ],
        "discriminator": {"propertyName": "method"},
    },
    "openapi page": _strict(items=_few(_strict(id=_UUID, url=_URL), 2), next=_or_null(_URL), total=_count(10**6)),
    # other programs
    "receipt": _strict(
        vendor=_text(),
        date=_DAY,
        lines=_few(_strict(name=_text(), quantity=_count(99, 1), price=_PRICE), minItems=1),
        total=_PRICE,
    ),
    "classification": _strict(label=_choice("spam", "ham"), confidence=number(0, 1)),
    "extraction": _strict(people=_few(_strict(name=_text(), role=_or_null(_text())), 2), places=_few(_text(), 2)),
    "reasoned answer": _strict(thoughts=_few(_text(most=20), minItems=1), answer={"anyOf": [_count(99), _text()]}),
    "quiz": _strict(question=_text(), options=_few(_text(), 4, minItems=4), answer=_count(3)),
    "geojson point": _strict(
        type={"const": "Point"}, coordinates=places(number(-180, 180), number(-90, 90), items=False, minItems=2)
    ),
    "package": open_object(
        "name version",
        name=_text(most=20, pattern="^(?:@[a-z0-9-]+/)?[a-z0-9-]+$", examples=["left-pad", "@a/b"]),
        version=_text(most=12, pattern="^\\d+\\.\\d+\\.\\d+(?:-[a-z0-9.]+)?$", examples=["1.2.3", "0.1.0-rc.1"]),
        scripts={"type": "object", "additionalProperties": _text()},
        private=_FLAG,
    ),
    "workflow": _strict(
        on=_few(_choice("push", "pull_request"), minItems=1),
        jobs=by_pattern(
            {"^[a-z]{1,8}$": _strict(runs=_choice("linux", "mac"), steps=_few(_text(), 2))},
            {"build": {"runs": "linux", "steps": ["a"]}},
            {},
        ),
    ),
    "interface": defined(
        "element",
        {
            "anyOf": [
                _strict(type={"const": "text"}, value=_text()),
                _strict(type={"const": "box"}, children=_few(ref("element"), 2)),
                _strict(type={"const": "button"}, label=_text(), enabled={"type": "boolean"}),
            ]
        },
    ),
    "filter expression": defined(
        "f",
        {
            "oneOf": [
                _strict(op=_choice("and", "or"), of=_few(ref("f"), 2, minItems=1)),
                _strict(op={"const": "not"}, arg=ref("f")),
                _strict(op={"const": "eq"}, field=_choice("a", "b"), value=_count(9)),
            ]
        },
    ),
}
