"""What all bodies and their parts have in common: fields that are not theirs are refused or logged, by name.

A value of the wrong type is refused, but strings for numbers and booleans are read: see `lax_scalars`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from serving.api.schema.lax_scalars import read_scalars
from serving.api.schema.unsupported_fields import Refused, check_closed, check_fields, describe_fields


def optional(description: str, **limits: Any) -> Any:
    """A field that may be left out, or null; `limits` are pydantic's."""
    return Field(None, description=description, **limits)


def or_else(expected: str) -> WrapValidator:
    """Raise a single error for a value that fits no branch of a union, instead of one error per branch."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("wrong_value", f"Input should be {expected}") from None

    return WrapValidator(check)


def _describe(schema: dict[str, Any], body: type[Body]) -> None:
    if not body.place:
        describe_fields(schema, body.refused)
    if body.closed:
        schema["additionalProperties"] = False
    if body.between_fields:
        schema["allOf"] = [*schema.get("allOf", []), *body.between_fields]


class Body(BaseModel):
    """A body, or an object in one.

    Attributes:
        refused: fields that are not supported.
        place: path of the object in the body, with a dot after it; empty for the body.
        between_fields: JSON schemas of what must hold between fields; the answer's code checks it.
        also: names that are known besides the fields, and say nothing.
        closed: whether other names are refused, in place of logged: they might change the answer.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, json_schema_extra=_describe)
    refused: ClassVar[Mapping[str, Refused]] = {}
    place: ClassVar[str] = ""
    between_fields: ClassVar[Sequence[Mapping[str, Any]]] = ()
    also: ClassVar[frozenset[str]] = frozenset()
    closed: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {each.alias or name for name, each in cls.model_fields.items()} | cls.also
        if cls.closed:
            check_closed(data, known, cls.place)
        check_fields(data, known, cls.refused, cls.place)
        return read_scalars(cls, data)
