"""`response_format` and `structured_outputs`: what the engine gets, and what is refused, by which name."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from api_clients import ASKS, CHAT, COMPLETIONS, post, refused, stream
from fake_engine import FakeEngine
from repository import ROOT

from serving.api.schema.errors import validation_error
from serving.api.schema.request_models import JsonSchemaFormat, ResponseFormat, StructuredOutputs
from serving.structured.patterns import LIBRARY_FORMATS, OWN_FORMATS, REFUSED_FORMATS
from serving.structured.schema import REFUSED as REFUSED_KEYWORDS

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAGS = {"structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}
NEWER = {"format": {"type": "tag", "begin": "<r>", "content": {"type": "any_text"}, "end": "</r>"}}
FORMATS: Mapping[str, Mapping[str, Any]] = {
    "json_object": {"type": "json_object"},
    "json_schema": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}},
    "tags": {"type": "structural_tag", **TAGS},
    "newer tags": {"type": "structural_tag", **NEWER},
}
OUTPUTS: Mapping[str, Mapping[str, Any]] = {
    "json": {"json": SCHEMA},
    "json as a text": {"json": json.dumps(SCHEMA)},
    "regex": {"regex": "a+"},
    "choice": {"choice": ["a", "b"]},
    "lark": {"grammar": 'start: "a"'},
    "gbnf": {"grammar": 'root ::= "a"'},
    "json_object": {"json_object": True},
    "tags": {"structural_tag": TAGS},
    "tags as a text": {"structural_tag": json.dumps(NEWER)},
    "white space": {"json": SCHEMA, "whitespace_pattern": "[ ]?"},
    "no white space": {"json": SCHEMA, "disable_any_whitespace": True},
    "closed": {"json": SCHEMA, "disable_additional_properties": True},
}


def grammars(path: str, body: Mapping[str, Any]) -> list[str | None]:
    """The grammars that the engine gets."""
    engine = FakeEngine()
    response = post(engine, path, {**ASKS[path], "max_tokens": 2, **body})
    assert response.status_code == 200, response.text
    return [request.params.grammar for request in engine.requests]


@pytest.mark.parametrize("path", ASKS)
def test_every_form_reaches_the_engine_as_a_grammar(path: str) -> None:
    found: dict[str, str | None] = {}
    for field, forms in (("response_format", FORMATS), ("structured_outputs", OUTPUTS)):
        for name, form in forms.items():
            (found[f"{field} {name}"],) = grammars(path, {field: form})
    assert None not in found.values()
    assert found["response_format json_schema"] == found["structured_outputs json"]
    assert found["structured_outputs json"] == found["structured_outputs json as a text"]
    assert found["response_format tags"] == found["structured_outputs tags"]
    assert found["response_format json_object"] == found["structured_outputs json_object"]
    assert len(set(found.values())) == len(found) - 4 - 1, "all others differ; the last: newer tags"


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "foo": None}},
    ],
)
def test_what_asks_for_no_form_costs_nothing(path: str, body: dict[str, Any]) -> None:
    assert grammars(path, body) == [None]


def test_every_output_has_the_grammar() -> None:
    asked = {"response_format": {"type": "json_object"}, "n": 2}
    of_chat = grammars(CHAT, asked)
    of_prompts = grammars(COMPLETIONS, {**asked, "prompt": ["a", "b"], "logprobs": 1})
    assert len(of_chat) == 2
    assert len(of_prompts) == 4
    assert len({*of_chat, *of_prompts}) == 1
    engine = FakeEngine()
    stream(engine, CHAT, {"response_format": {"type": "json_object"}})
    assert {request.params.grammar for request in engine.requests} == set(of_chat)


def test_strings_for_booleans_are_read_as_elsewhere() -> None:
    for path in ASKS:
        strict = {"type": "json_schema", "json_schema": {**FORMATS["json_schema"]["json_schema"], "strict": "true"}}
        assert grammars(path, {"response_format": strict}) == grammars(
            path, {"response_format": FORMATS["json_schema"]}
        )
        spaced = {"json": {"type": "array"}, "disable_any_whitespace": "true"}
        assert grammars(path, outputs(**spaced)) == grammars(path, outputs(**spaced | {"disable_any_whitespace": True}))


SCHEMA_OF = "response_format.json_schema.schema"


def schema(given: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": given}}}


def outputs(**given: Any) -> dict[str, Any]:
    return {"structured_outputs": given}


BOTH = {**outputs(regex="a"), "response_format": {"type": "json_object"}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
    ({"response_format": "json"}, "response_format", "'json'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, SCHEMA_OF, "missing"),
    ({"response_format": {"type": "json_object", "format": {}}}, "response_format.format", "'structural_tag'"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "a format, or structures"),
    (BOTH, "structured_outputs", "send one of them"),
    (schema(5), SCHEMA_OF, "valid dictionary"),
    (schema({"not": {}}), SCHEMA_OF, "not is not supported: give what is allowed"),
    (schema({"properties": {"a": {"items": {"if": {}}}}}), SCHEMA_OF, "properties.a.items.if: if is not supported"),
    (schema({"type": "strin"}), SCHEMA_OF, "Invalid type: strin"),
    (schema({"enum": []}), SCHEMA_OF, "Unsatisfiable"),
    (outputs(json_object=False), "structured_outputs", "it has none"),
    (outputs(foo=1), "structured_outputs.foo", "the fields are choice, "),
    (outputs(regex="a", foo=1), "structured_outputs.foo", "it is 1"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "the fields are format, "),
    (outputs(json_object=True, regex="a"), "structured_outputs", "it has regex and json_object"),
    (outputs(whitespace_pattern="a"), "structured_outputs", "it has none"),
    (outputs(json="{"), "structured_outputs.json", "no JSON"),
    (outputs(json="[]"), "structured_outputs.json", "an object or a boolean"),
    (outputs(regex="("), "structured_outputs.regex", "unclosed group"),
    (outputs(regex="(?=a)"), "structured_outputs.regex", "look-ahead"),
    (outputs(regex=5), "structured_outputs.regex", "valid string"),
    (outputs(choice=[]), "structured_outputs.choice", "empty"),
    (outputs(choice=["a", 5]), "structured_outputs.choice.1", "valid string"),
    (outputs(grammar="abc"), "structured_outputs.grammar", "'start: ...'"),
    (outputs(grammar="start: <|nobody|>"), "structured_outputs.grammar", "'<|nobody|>'"),
    (outputs(grammar="start: a\na[max_tokens=5]: /.*/"), "structured_outputs.grammar", "max_tokens"),
    (outputs(structural_tag={"format": {"type": "any"}}), "structured_outputs.structural_tag", "'any'"),
    (outputs(json=5), "structured_outputs.json", "a JSON schema, as an object or as text, not 5"),
    (outputs(structural_tag=[]), "structured_outputs.structural_tag", "as an object or as text"),
    (outputs(json={}, whitespace_pattern="("), "structured_outputs.whitespace_pattern", "unclosed group"),
    (outputs(json={"enum": []}, whitespace_pattern=" "), "structured_outputs.json", "Unsatisfiable"),
    (outputs(json={}, whitespace_pattern="(?=a)"), "structured_outputs.whitespace_pattern", "look-ahead"),
    ({"guided_json": {}}, "guided_json", "use structured_outputs: {'json': ...}"),
    ({"ebnf": "a"}, "ebnf", "use structured_outputs: {'grammar': ...}"),
]


@pytest.mark.parametrize("path", ASKS)
def test_what_cannot_be_enforced_is_refused_by_name(path: str) -> None:
    for body, param, message in REFUSED:
        error = refused(FakeEngine(), path, {**ASKS[path], **body})
        assert error["param"] == param, (body, error)
        assert message in error["message"], (body, error)


@pytest.mark.parametrize(
    ("place", "kind", "param"),
    [
        (("a", "json", "dict[str,any]"), "dict_type", "a.json"),
        (("a", "list[str]", "list", 1, "str"), "string_type", "a.list.1"),
        (("a", "tagged", "name"), "missing", "a.name"),
        (("tagged", "b"), "missing", "b"),
    ],
)
def test_a_param_names_what_is_in_the_body(place: tuple[Any, ...], kind: str, param: str) -> None:
    """And no branch of a union, which pydantic names between them."""
    body = {"a": {"json": 5, "list": ["a", 5]}}
    error = validation_error([{"type": kind, "loc": ("body", *place), "msg": "no", "input": 5}], body)
    assert error.param == param


NESTED: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "response_format.type": (FORMATS["json_schema"] | {"type": "text", "json_schema": None}, FORMATS["json_schema"]),
    "response_format.json_schema": (schema({})["response_format"], FORMATS["json_schema"]),
    "response_format.structures": (FORMATS["newer tags"], FORMATS["tags"]),
    "response_format.triggers": (FORMATS["tags"], FORMATS["tags"] | {"triggers": ["<f=a"]}),
    "response_format.format": (FORMATS["tags"], FORMATS["newer tags"]),
    **{
        f"structured_outputs.{name}": ({}, OUTPUTS[kind])
        for kind in ("json", "regex", "choice", "lark", "json_object", "tags")
        for name in OUTPUTS[kind]
    },
    "structured_outputs.whitespace_pattern": (OUTPUTS["json"], OUTPUTS["white space"]),
    "structured_outputs.disable_any_whitespace": (OUTPUTS["json"], OUTPUTS["no white space"]),
    "structured_outputs.disable_additional_properties": (OUTPUTS["json"], OUTPUTS["closed"]),
}
"""Field inside a field -> two values of the outer one that differ in it."""
CHANGE_NOTHING = {"response_format.json_schema.name", "response_format.json_schema.description"}
CHANGE_NOTHING |= {"response_format.json_schema.strict", "response_format.json_schema.schema"}  # the latter: see above


def test_every_field_inside_changes_the_grammar() -> None:
    inside = {
        f"{model.place}{each.alias or name}"
        for model in (ResponseFormat, JsonSchemaFormat, StructuredOutputs)
        for name, each in model.model_fields.items()
    }
    assert inside == NESTED.keys() | CHANGE_NOTHING
    for place, forms in NESTED.items():
        outer = place.split(".")[0]
        first, second = (grammars(COMPLETIONS, {outer: form}) for form in forms)
        assert first != second, place


def test_the_document_has_the_refused_keywords_and_formats() -> None:
    rows = {row.split(" | ")[0]: row for row in (ROOT / "docs" / "api.md").read_text().splitlines()}
    (refused,) = (keywords for keywords, row in rows.items() if "refused, by name and place" in row)
    assert re.findall(r"`([^`]+)`", refused) == list(REFUSED_KEYWORDS)
    done, rest = rows["| `format`"].split("; ", 1)
    named = re.findall(r"`([^`]+)`", done.split(" | ")[1])
    assert set(named) == OWN_FORMATS.keys() | LIBRARY_FORMATS
    assert set(re.findall(r"`([^`]+)`", rest)) == REFUSED_FORMATS
