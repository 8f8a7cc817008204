"""Tools, the choice among them, and the form of the text, in the flat form of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator

from serving.api.schema.body import optional
from serving.api.schema.tool_models import MAX_TOOLS, FunctionName
from serving.api.schema.typed_objects import TypedObject, by_type, type_of, wrong

MAX_FORM_NAME_CHARACTERS = 256


class FunctionTool(TypedObject):
    """A function that the model may call."""

    place = "tools."

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = optional("a JSON schema of the arguments")
    strict: bool | None = optional("the arguments follow the schema")


Tool = Annotated[
    FunctionTool, by_type({"function": FunctionTool}, "tools", {}, "only functions are, which the client runs")
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ChosenFunction(TypedObject):
    """The function that the model must call."""

    place = "tool_choice."

    type: Literal["function"]
    name: FunctionName


class AllowedTools(TypedObject):
    """The functions that the model may call (auto), or one of which it must call (required)."""

    place = "tool_choice."

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(min_length=1, fail_fast=True)]


def _choice(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if value in ("none", "auto", "required"):
        return value
    match type_of(value):
        case "function":
            return ChosenFunction.model_validate(value)
        case "allowed_tools":
            return AllowedTools.model_validate(value)
    raise wrong(
        "Input should be 'none', 'auto', 'required', a function {'type': 'function', 'name': ...} or allowed_tools"
    )


ToolChoice = Annotated[Literal["none", "auto", "required"] | ChosenFunction | AllowedTools, WrapValidator(_choice)]


class TextForm(TypedObject):
    """Any text."""

    place = "text.format."

    type: Literal["text"]


class JsonObjectForm(TypedObject):
    """Any JSON object."""

    place = "text.format."

    type: Literal["json_object"]


class JsonSchemaForm(TypedObject):
    """JSON that follows a schema."""

    place = "text.format."
    also = frozenset({"schema"})

    type: Literal["json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=MAX_FORM_NAME_CHARACTERS)]
    # `schema` is a method of pydantic's models, so the field has another name.
    schema_: dict[str, Any] = Field(alias="schema", description="a JSON schema")
    description: str | None = optional("changes nothing")
    strict: bool | None = optional("changes nothing: the schema is always enforced as it is")


TextFormat = Annotated[
    TextForm | JsonObjectForm | JsonSchemaForm,
    by_type(
        {"text": TextForm, "json_object": JsonObjectForm, "json_schema": JsonSchemaForm},
        "formats",
        {},
        "use json_schema",
    ),
]
