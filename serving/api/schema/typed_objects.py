"""Objects that say by their `type` what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ValidatorFunctionWrapHandler, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from serving.api.schema.request_models import _Body
from serving.api.schema.unsupported_fields import check_fields
from ubatch.errors import shown


class TypedObject(_Body):
    """A part of a body that may have been part of an answer before.

    Attributes:
        also: names that are known besides the fields: clients send back what they got, and not all of it says something
            to the model.
    """

    also: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        if isinstance(data, dict):
            check_fields(data, cls.model_fields.keys() | cls.also, cls.refused, cls.place)
        return data


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
