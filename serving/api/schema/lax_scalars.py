"""Strings for numbers and booleans, read as pydantic's lax mode reads them: `"n": "2"`, `"stream": "true"`.

vLLM and SGLang read them so; bodies are strict in everything else. A boolean for a number stays an error, though lax
mode would take `true` for 1: who sends a chat's `logprobs: true` to completions did not ask for one top token.

A field's annotation says what is read:

    an integer or a number    a string; `true` is refused
    a boolean                 a string such as `true`, `off` or `1`, and the integers 0 and 1
    a list or an object       the same for each of its values
    anything with a text      nothing: its strings are meant

What cannot be read is left as it is, for the strict check to refuse by its place.
"""

from collections.abc import Collection, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

MAX_CHARACTERS = 100
"""A longer string is no number. To read one takes the square of its digits."""
MAX_ITEMS = 2**12
"""A longer list is not looked at: it would hold up other requests."""

_LAX: Mapping[Any, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (bool, int, float, list[int], list[float], dict[str, int], dict[str, float])
}


def read_scalars(model: type[BaseModel], data: Mapping[str, Any]) -> dict[str, Any]:
    """A body's fields, with values that `model` wants as numbers or booleans read from strings."""
    kinds = _kinds(model)
    return {name: read_scalar(kinds.get(name), value) for name, value in data.items()}


def read_scalar(kind: Any, value: Any) -> Any:
    """A value as one of type `kind`, read from strings; as it is if it cannot be read so."""
    if kind not in _LAX or not _readable(kind, value):
        return value
    try:
        return _LAX[kind].validate_python(value)
    except ValidationError:
        return value


def _readable(kind: Any, value: Any) -> bool:
    if kind is bool and type(value) is int:
        return True
    container, given = get_origin(kind), type(value)
    if given is not (container or str):
        return False
    values: Collection[Any] = (value,)
    if container is not None:
        values = value.values() if container is dict else value
    if len(values) > MAX_ITEMS:
        return False
    texts = [each for each in values if type(each) is str]
    only_scalars = {*map(type, values)} <= {str, int, float}
    return bool(texts) and only_scalars and max(map(len, texts)) <= MAX_CHARACTERS


@cache
def _kinds(model: type[BaseModel]) -> dict[str, Any]:
    """Field, by the name that clients send -> the type of its values; None where there are several."""
    return {field.alias or name: _kind(field.annotation) for name, field in model.model_fields.items()}


def _kind(annotation: Any) -> Any:
    """The one type of an annotation without None and constraints; None if there are several."""
    origin, of = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(of[0])
    if origin is Literal:
        kinds = {type(value) for value in of}
    elif origin in (Union, UnionType):
        kinds = {_kind(option) for option in of}
    elif origin is list:
        return list[_kind(of[0])]  # type: ignore[misc]
    elif origin is dict:
        return dict[_kind(of[0]), _kind(of[1])]  # type: ignore[misc]
    else:
        return annotation
    kinds -= {NoneType}
    return kinds.pop() if len(kinds) == 1 else None
