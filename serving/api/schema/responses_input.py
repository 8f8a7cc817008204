"""Items of a `/v1/responses` body's input: what was said, called and answered before."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidatorFunctionWrapHandler, WrapValidator

from serving.api.schema.body import optional, or_else
from serving.api.schema.typed_objects import TypedObject, by_type, wrong

_TEXT_ONLY = dict.fromkeys(("input_image", "input_file", "input_audio"), "only text is read")
_NOT_READ = "only messages, function calls, their outputs and reasoning are read"
_RETURNED = frozenset({"id", "status", "phase", "annotations", "logprobs"})


class _Item(TypedObject):
    """An item, or a part of one."""

    place = "input."
    also = _RETURNED


class InputText(_Item):
    """A text."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class Refusal(_Item):
    """What a model said in place of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The text, as other parts have it."""
        return self.refusal


Part = Annotated[
    InputText | Refusal,
    by_type(
        {"input_text": InputText, "output_text": InputText, "text": InputText, "refusal": Refusal},
        "parts",
        _TEXT_ONLY,
        "only texts are read",
    ),
]
_PARTS: TypeAdapter[list[Any]] = TypeAdapter(Annotated[list[Part], Field(fail_fast=True)])


def _text_or(several: TypeAdapter[list[Any]], what: str) -> WrapValidator:
    """A text, or a list of something. Errors are those of what is wrong in the list."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(value, str | list):
            raise wrong(f"Input should be a text or a list of {what}")
        return value if isinstance(value, str) else several.validate_python(value)

    return WrapValidator(check)


Text = Annotated[str | list[Part], _text_or(_PARTS, "text parts")]


class Message(_Item):
    """What somebody says."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text


class FunctionCall(_Item):
    """A call that the model made."""

    also = _RETURNED | {"namespace", "caller", "async"}

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="a JSON object, as text")


class FunctionCallOutput(_Item):
    """What a call returned."""

    also = _RETURNED | {"namespace", "caller", "name"}

    type: Literal["function_call_output"]
    call_id: str
    output: Text


class ReasoningText(_Item):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class Reasoning(_Item):
    """What the model thought before its next item. The summary is read where there is no content."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(fail_fast=True)] = Field(default_factory=list)
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    encrypted_content: Annotated[
        Literal[""] | None, or_else("null: what another server has encrypted cannot be read here")
    ] = optional("not supported: this server has no key")


Item = Message | FunctionCall | FunctionCallOutput | Reasoning
_ITEM = by_type(
    {
        "message": Message,
        "function_call": FunctionCall,
        "function_call_output": FunctionCallOutput,
        "reasoning": Reasoning,
    },
    "items",
    {"item_reference": "nothing is stored; send the item itself"},
    _NOT_READ,
)


def _with_type(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, dict) and "type" not in value and "role" in value:
        return Message.model_validate(value)
    return handler(value)


InputItem = Annotated[Item, _ITEM, WrapValidator(_with_type)]
_Items = Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
Input = Annotated[str | _Items, _text_or(TypeAdapter(_Items), "items")]
"""A body's input."""
