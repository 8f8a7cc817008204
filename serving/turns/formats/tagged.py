"""Formats whose parameters are text between tags. Arguments are JSON, written from that text by the parameters' types.

`glm45` (GLM-4.5, 4.6, 4.7):

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

`qwen3_coder` (Qwen3-Coder, Qwen3.5):

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

from serving.turns.marked import CallFormat, MarkedTurn
from serving.turns.reading import Give, Malformed, Reading

_BEGIN, _END = _MARKS = ("<tool_call>", "</tool_call>")
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_FUNCTION, _FUNCTION_END, _PARAMETER = "<function=", "</function>", "<parameter="
_VALUE_ENDS = ("\n</parameter>", "</parameter>")
_WORDS = {"True": True, "False": False, "None": None}
"""As Python writes them, which models do, too."""
_MAX_DEPTH = 8
_KINDS: Mapping[type, set[str]] = {
    NoneType: {"null"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
}
"""Type of a value -> its types in JSON Schema."""


def _read_glm(turn: MarkedTurn) -> Reading[None]:
    while (mark := (yield from turn.prose((_BEGIN,), turn.content))) is not None:
        yield from turn.attempt(_glm_call(turn), mark)


def _glm_call(turn: MarkedTurn) -> Reading[None]:
    text = turn.text
    yield from text.space()
    name, found = yield from text.up_to("\n", _KEY, _END)
    name = name.strip()
    turn.call(name)
    arguments = ArgumentsWriter(turn, name)
    if found == "\n":
        yield from text.space()
        found = yield from text.expect(_KEY, _END)
    while found == _KEY:
        key, _ = yield from text.up_to(_KEY_END)
        yield from text.space()
        yield from text.expect(_VALUE)
        value = arguments.value(key.strip())
        yield from text.until((_VALUE_END,), value.add)
        value.close()
        yield from text.space()
        found = yield from text.expect(_KEY, _END)
    arguments.close()


def _read_coder(turn: MarkedTurn) -> Reading[None]:
    """Some models leave out the outer mark."""
    while (mark := (yield from turn.prose((_BEGIN, _FUNCTION), turn.content))) is not None:
        yield from turn.attempt(_coder_call(turn, mark), mark)


def _coder_call(turn: MarkedTurn, mark: str) -> Reading[None]:
    text = turn.text
    if mark == _BEGIN:
        yield from text.space()
        yield from text.expect(_FUNCTION)
    name = yield from _name(turn)
    turn.call(name)
    arguments = ArgumentsWriter(turn, name)
    yield from text.space()
    while (yield from text.expect(_PARAMETER, _FUNCTION_END)) == _PARAMETER:
        value = arguments.value((yield from _name(turn)))
        yield from text.one_of("\n")
        yield from text.until(_VALUE_ENDS, value.add)
        value.close()
        yield from text.space()
    arguments.close()
    yield from text.space()
    yield from text.one_of(_END)


def _name(turn: MarkedTurn) -> Reading[str]:
    name, end = yield from turn.text.up_to(">", "\n")
    if end != ">":
        raise Malformed
    return name


GLM45, QWEN3_CODER = CallFormat(_read_glm, _MARKS), CallFormat(_read_coder, _MARKS)


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
    kinds = _KINDS[type(value)]
    return kinds | {"integer"} if isinstance(value, float) and value.is_integer() else kinds


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
