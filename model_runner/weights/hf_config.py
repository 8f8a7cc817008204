"""Reads `config.json` with typed access: errors name the missing or invalid entry and the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_runner.errors import CheckpointError

__all__ = ["HFConfig"]

_REQUIRED: Any = object()


class HFConfig:
    """A Hugging Face `config.json`."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def integer(self, *names: str, default: int = _REQUIRED, at_least: int = 1) -> int:
        """The first entry of `names` that exists.

        Raises:
            CheckpointError: none exists and there is no default, or the value is not an integer of at least `at_least`.
        """
        value: Any = self._get(names, default)
        if type(value) is not int or value < at_least:
            raise self.wrong(names[0], value, f"an integer of at least {at_least}")
        return value

    def number(self, name: str, default: float = _REQUIRED, *, or_zero: bool = False) -> float:
        """A positive number, or zero where that is allowed; errors as `integer`."""
        value: Any = self._get((name,), default)
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        if wrong or value < 0 or (value == 0 and not or_zero):
            raise self.wrong(name, value, "a number of at least 0" if or_zero else "a positive number")
        return float(value)

    def optional_integer(self, name: str) -> int | None:
        """As `integer`, or None where the entry is null or absent."""
        return None if self.values.get(name) is None else self.integer(name)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean; errors as `integer`."""
        value: Any = self._get((name,), default)
        if type(value) is not bool:
            raise self.wrong(name, value, "true or false")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers, a single one, or nothing (null or absent); errors as `integer`."""
        value = self.values.get(name)
        if value is None:
            return ()
        if type(value) is int:
            return (value,)
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise self.wrong(name, value, "a list of integers")
        return tuple(value)

    def wrong(self, name: str, value: object, wanted: str) -> CheckpointError:
        """The error for an invalid entry."""
        return CheckpointError(f"{self.path}: {name} is {value!r}; this architecture needs {wanted}.")

    def _get(self, names: tuple[str, ...], default: object) -> object:
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        if default is _REQUIRED:
            raise CheckpointError(f"{self.path} has no {' or '.join(map(repr, names))}, which this architecture needs.")
        return default
