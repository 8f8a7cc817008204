"""What all bodies and their parts have in common: fields that are not theirs are refused or logged, by name.

A value of the wrong type is refused, but strings for numbers and booleans are read: see `lax_scalars`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, get_args

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
from ubatch.errors import shown


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


def type_of(value: Any) -> str | None:
    """The `type` of a JSON value; None if it has none."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


def wrong(message: str) -> PydanticCustomError:
    """The error for a value of no known form."""
    # Braces in a template name values, and a client's own may be in the message.
    return PydanticCustomError("wrong_value", "{message}", {"message": message})


def by_type(*models: type[Body], what: str, refused: Mapping[str, str] | None = None, why: str) -> WrapValidator:
    """Validates an object by the model of its type. A union's errors would be those of all its branches.

    Args:
        models: each says by the annotation of its field `type` for which types it is.
        what: what such objects are called, in the plural.
        refused: type -> why it is not supported.
        why: why other types are not.
    """
    of_type = {kind: model for model in models for kind in get_args(model.model_fields["type"].annotation)}

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        kind = type_of(value)
        if kind is None:
            raise wrong(f"{what} should be objects with a type, one of {', '.join(of_type)}")
        if kind not in of_type:
            raise wrong(f"{what} of the type {shown(kind)} are not supported: {(refused or {}).get(kind, why)}")
        return of_type[kind].model_validate(value)

    return WrapValidator(check)
