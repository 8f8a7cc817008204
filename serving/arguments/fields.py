"""A command's options: fields of pydantic models, one flag each, and the errors for wrong values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from ubatch.errors import UBatchError, nearest, shown


@dataclass(frozen=True)
class Flag:
    """How a field looks on the command line, if that does not follow from its type.

    Attributes:
        metavar: what `--help` shows for the value.
        default: text that `--help` shows as the default; "" shows none.
        name: name of the flag, without dashes, in snake case.
        alias: a second name, dashes included.
        positional: the field is a positional argument, without a flag.
        has_off: a switch also has a `--no-` flag, which turns it off.
        many: the flag takes any number of words.
        adds: given again, the flag adds a value; of any other the last value counts.
        dotted: `--flag.key value` gives one entry of a mapping, as `--flag '{"key": value}'` does.
        secret: a wrong value is not shown.
    """

    metavar: str | None = None
    default: str | None = None
    name: str | None = None
    alias: str | None = None
    positional: bool = False
    has_off: bool = True
    many: bool = False
    adds: bool = False
    dotted: bool = False
    secret: bool = False


class WrongValue(UBatchError):
    """A setting was given a wrong value. Not a ValueError, because pydantic would wrap it.

    Attributes:
        why: what the value should be; completes a sentence that starts with the setting's name.
        missing: the setting is required but was not given.
        unreadable: the value has the wrong type, or is none of the allowed ones.
    """

    def __init__(self, name: str, value: object, why: str, kind: str = "") -> None:
        self.name, self.value, self.why = name, value, why
        self._whole = kind == _WHOLE
        super().__init__(f"{name}: {self.sentence(shown(value))}")
        self.missing = kind == "missing"
        self.unreadable = kind in _UNREADABLE

    def sentence(self, value: str) -> str:
        """`why`, with the value if that does not name it."""
        return f"{self.why}." if self._whole else f"{self.why}, not {value}."


_WHOLE = "names_the_value"


def whole(message: str) -> PydanticCustomError:
    """What a validator raises whose message names the wrong value itself; no full stop."""
    return PydanticCustomError(_WHOLE, "{message}", {"message": message})


class Group(BaseModel):
    """A group of settings, each with a flag. A wrong value raises `WrongValue`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _name_what_is_wrong(cls, values: Any, validate: ModelWrapValidatorHandler[Group]) -> Group:
        try:
            group = validate(values)
        except ValidationError as error:
            wrong = min(
                error.errors(include_url=False, include_context=False), key=lambda each: each["type"] == "missing"
            )
            name, kind = str(wrong["loc"][0]), wrong["type"]
            whole = isinstance(values, dict) and name in values and kind not in _UNREADABLE
            raise WrongValue(
                name, values[name] if whole else wrong["input"], _plain(wrong["msg"], kind), kind
            ) from None
        for name in group.model_fields_set:
            value = getattr(group, name)
            for each in value if isinstance(value, tuple) else (value,):
                if why := _cannot_be_used(each):
                    raise WrongValue(name, each, why)
        return group


def _cannot_be_used(value: object) -> str | None:
    """Why no setting can have the value, whatever the setting; None if one can."""
    if isinstance(value, int) and abs(value) >= 2**63:
        return "it should be less than 2**63"  # there are no larger integers in messages between processes
    if isinstance(value, str | Path) and "\0" in str(value):
        return "it should be text without NUL characters"
    if isinstance(value, Path) and (len(str(value)) > _LONGEST_PATH or any(len(name) > 255 for name in value.parts)):
        return f"it should be a path of at most {_LONGEST_PATH} characters, with names of at most 255"
    return None


_LONGEST_PATH = 4095
_NO_NUMBER = {"int_parsing": "expected an integer", "float_parsing": "expected a number"}
_UNREADABLE = (*_NO_NUMBER, "literal_error", "enum")


def _plain(message: str, kind: str) -> str:
    """Rewrite pydantic's message to complete a sentence that starts with the setting's name."""
    message = re.sub(r"^Value error, |^(Input|String|Tuple) should", lambda m: "it should" if m[1] else "", message)
    message = message.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    return _NO_NUMBER.get(kind) or message.replace("a valid dictionary", "a mapping")


def nearest_alone(name: str, known: Iterable[str]) -> str:
    """The hint of `nearest` without its list of known names, which `--help` shows; "" if no name is near."""
    hint = nearest(name, known).partition(" Known: ")[0]
    return hint if "?" in hint else ""
