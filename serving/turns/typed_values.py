"""Writes arguments as JSON from values that a format gives as plain text, by the types of the function's parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from serving.turns.marked import MarkedTurn
from serving.turns.reading import Give

_WORDS = {"True": True, "False": False, "None": None}
"""As Python writes them, which models do, too."""
_MAX_DEPTH = 8


class ArgumentsWriter:
    """Writes one call's arguments, as they come.

    Args:
        turn: has the call.
        function: the function's name.
    """

    def __init__(self, turn: MarkedTurn, function: str) -> None:
        self._turn = turn
        self._schema = turn.tools.get(function) or {}
        self._empty = True

    def value(self, name: str) -> _Value:
        """A parameter's value that begins; `close` ends it."""
        self._turn.arguments(f"{'{' if self._empty else ', '}{json.dumps(name, ensure_ascii=False)}: ")
        self._empty = False
        properties = self._schema.get("properties")
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        return _Value(self._turn.arguments, frozenset(_types(schema, self._schema)))

    def close(self) -> None:
        """All parameters have come."""
        self._turn.arguments("{}" if self._empty else "}")


class _Value:
    def __init__(self, give: Give, types: frozenset[str]) -> None:
        self._give = give
        self._types = types
        self._text: list[str] | None = None if types <= {"string"} else []
        if self._text is None:
            give('"')

    def add(self, text: str) -> None:
        """The next characters of the value."""
        if self._text is None:
            self._give(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._text.append(text)

    def close(self) -> None:
        """The value is complete."""
        self._give('"' if self._text is None else _as_json("".join(self._text), self._types))


def _as_json(text: str, types: frozenset[str]) -> str:
    """A value as JSON: as its type says, or a string if it is not of that type."""
    words = text.strip()
    try:
        value = _WORDS[words] if words in _WORDS else json.loads(words, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = words.lower() == "true" if "boolean" in types and words.lower() in ("true", "false") else text
    if isinstance(value, str) or not _kinds(value) & types:
        return json.dumps(text, ensure_ascii=False)
    return words if words not in _WORDS and not isinstance(value, bool) else json.dumps(value)


def _refuse(name: str) -> None:
    raise ValueError(name)


def _kinds(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", *(["integer"] if value.is_integer() else [])}
        case dict():
            return {"object"}
        case list():
            return {"array"}
        case _:
            return {"string"}


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """JSON types that a schema allows, as far as it says; none for anything."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    given = schema.get("type")
    several = given if isinstance(given, list) else [given]
    yield from (each for each in several if isinstance(each, str))
    if given is None:
        values = schema.get("enum")
        for value in [*(values if isinstance(values, list) else []), *([schema["const"]] if "const" in schema else [])]:
            yield from _kinds(value)
    for name in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(name)
        for branch in branches if isinstance(branches, list) else ():
            yield from _types(branch, root, depth + 1)
    target: Any = root
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        for step in reference[2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        yield from _types(target, root, depth + 1)
