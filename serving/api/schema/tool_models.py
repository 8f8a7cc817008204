"""The part of a request that is about tools: what the model may call, and whether it must."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.api.schema.body import optional

MAX_TOOLS = 1024
MAX_TOOL_NAME_CHARACTERS = 256

FunctionName = Annotated[
    str, Field(min_length=1, max_length=MAX_TOOL_NAME_CHARACTERS, pattern=r"^[\w.:/-]+$", description="no white space")
]


class _Tool(BaseModel):
    """Other fields are passed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")


class FunctionDefinition(_Tool):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = optional("JSON schema of an object; none for no parameters")
    strict: bool | None = optional("only with a tool_choice that forces the call it is enforced")


class Tool(_Tool):
    """A tool; all are functions."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(BaseModel):
    """A function of the request's tools."""

    name: str


class NamedToolChoice(BaseModel):
    """The call that the model must make."""

    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice
EXPECTED_CHOICE = "'none', 'auto', 'required', or {'type': 'function', 'function': {'name': ...}}"
