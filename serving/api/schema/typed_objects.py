"""Objects that say by their `type` what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from serving.api.schema.body import Body
from ubatch.errors import shown


class TypedObject(Body):
    """A part of a body that may come from an answer; `also` has what clients send back as they got it."""


def type_of(value: Any) -> str | None:
    """The `type` of a JSON value; None if it has none."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


def wrong(message: str) -> PydanticCustomError:
    """The error for a value of no known form."""
    # Braces in a template name values, and a client's own may be in the message.
    return PydanticCustomError("wrong_value", "{message}", {"message": message})


def by_type(models: Mapping[str, type[BaseModel]], what: str, refused: Mapping[str, str], why: str) -> WrapValidator:
    """Validates an object by the model of its type. A union's errors would be those of all its branches.

    Args:
        what: what such objects are called, in the plural.
        refused: type -> why it is not supported.
        why: why other types are not.
    """

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        kind = type_of(value)
        if kind is None:
            raise wrong(f"{what} should be objects with a type, one of {', '.join(models)}")
        if kind not in models:
            raise wrong(f"{what} of the type {shown(kind)} are not supported: {refused.get(kind, why)}")
        return models[kind].model_validate(value)

    return WrapValidator(check)
