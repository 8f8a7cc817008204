"""Fields of requests that ask for a form of the output: OpenAI's `response_format`, and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from serving.api.schema.body import Body, optional, or_else

_Text = Annotated[str, Field(min_length=1)]


class JsonSchemaFormat(Body):
    """A JSON schema, as OpenAI's clients send it."""

    place = "response_format.json_schema."

    name: str | None = optional("changes nothing")
    description: str | None = optional("changes nothing")
    schema_: dict[str, Any] = Field(alias="schema", description="what the output must be, as JSON")
    strict: bool | None = optional("changes nothing: the schema is always enforced as it is")


class ResponseFormat(Body):
    """The form of the output. `json_object`: any JSON object."""

    place = "response_format."
    closed = True
    between_fields = (
        {
            "anyOf": [
                {"properties": {"type": {"enum": ["text", "json_object", "structural_tag"]}}},
                {"properties": {"json_schema": {"type": "object"}}, "required": ["json_schema"]},
            ]
        },
    )

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = optional("with json_schema only")
    structures: list[dict[str, Any]] | None = optional("with structural_tag: begin, schema, end")
    triggers: list[_Text] | None = optional("with structures: texts that begin one")
    format: dict[str, Any] | None = optional("with structural_tag, in place of structures: xgrammar's")


class StructuredOutputs(Body):
    """The form of the output; exactly one of the first six."""

    model_config = ConfigDict(protected_namespaces=())
    place = "structured_outputs."
    closed = True

    json_: Annotated[dict[str, Any] | str | None, or_else("a JSON schema, as an object or as text")] = optional(
        "a JSON schema, or its text", alias="json"
    )
    regex: str | None = optional("a regular expression that the whole output matches")
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = optional("the output is one of these")
    grammar: _Text | None = optional("a context-free grammar, in Lark's or GBNF's notation")
    json_object: bool | None = optional("any JSON object")
    structural_tag: Annotated[dict[str, Any] | str | None, or_else("a structural tag, as an object or as text")] = (
        optional("as in response_format, or its text")
    )
    whitespace_pattern: str | None = optional(
        "regular expression of the white space between JSON's tokens (one blank, or a line's end and an indentation)"
    )
    disable_any_whitespace: bool | None = optional("JSON without white space")
    disable_additional_properties: bool | None = optional(
        "objects have no other properties than those of the schema, where it does not say so"
    )
