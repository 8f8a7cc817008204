"""Reads calls that are JSON: an object with the function's name and its arguments, or a list of such objects.

The JSON arrives in pieces. What was passed on is the beginning of valid JSON at any time."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from serving.turns.marked import MarkedTurn
from serving.turns.reading import Ended, Give, Malformed, Reading, Text

ARGUMENTS = ("arguments", "parameters")


def read_call(
    turn: MarkedTurn, *, keys: Sequence[str] = ARGUMENTS, names: Collection[str] | None = None
) -> Reading[None]:
    """Read an object with `name` and arguments, white space before it included; to be used in `MarkedTurn.attempt`.

    Args:
        keys: what the arguments may be called.
        names: functions that there are: an object that names another one, or has no arguments, is no call. None where a
            mark says that it is one.

    Raises:
        Malformed: it is no call.
    """
    text = turn.text
    yield from text.space()
    yield from text.expect("{")
    name: str | None = None
    arguments: list[str] | None = None
    told = False
    yield from text.space()
    found = yield from text.one_of("}")
    while found != "}":
        yield from text.space()
        key = yield from read_string(text)
        yield from text.space()
        yield from text.expect(":")
        yield from text.space()
        if key == "name" and name is None:
            name = yield from read_string(text)
            if names is not None and name not in names:
                raise Malformed
        elif key in keys and arguments is None:
            arguments = []
            if name is not None:
                turn.call(name)
                told = True
            yield from read_arguments(turn, turn.arguments if told else arguments.append)
        else:
            yield from read_value(text, lambda _: None)
        yield from text.space()
        found = yield from text.expect(",", "}")
    if name is None or (names is not None and arguments is None):
        raise Malformed
    if not told:
        turn.call(name)
        turn.arguments("".join(arguments or ()) or "{}")


def read_calls(
    turn: MarkedTurn, mark: str, *, keys: Sequence[str] = ARGUMENTS, names: Collection[str] | None = None
) -> Reading[None]:
    """Read a list of such objects, each a call of its own.

    Args:
        mark: what was read before the list, which is part of its first call.
        keys: see `read_call`.
        names: see `read_call`.
    """

    def first() -> Reading[None]:
        yield from turn.text.space()
        yield from turn.text.expect("[")
        yield from read_call(turn, keys=keys, names=names)

    good = yield from turn.attempt(first(), mark)
    while good:
        yield from turn.text.space()
        if (yield from turn.text.one_of(",", "]")) != ",":
            return
        good = yield from turn.attempt(read_call(turn, keys=keys, names=names), ",")


def read_arguments(turn: MarkedTurn, give: Give | None = None) -> Reading[None]:
    """Read a call's arguments: an object, the text of one as a string, or null for none.

    Args:
        give: gets their text; None for the call that is read.

    Raises:
        Malformed: they are something else.
    """
    text, give = turn.text, give or turn.arguments
    match (yield from text.peek()):
        case "{":
            yield from read_value(text, give)
        case '"':
            said = (yield from read_string(text)).strip() or "{}"
            try:
                read = json.loads(said)
            except (ValueError, RecursionError):
                raise Malformed from None
            if not isinstance(read, dict):
                raise Malformed
            give(said)
        case "n":
            yield from text.expect("null")
            give("{}")
        case _:
            raise Malformed


_WHITE = " \t\n\r"
_SPACE = re.compile(f"[{_WHITE}]*")
_CHARACTERS = re.compile(r'(?:[^"\\\x00-\x1f]+|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_PLAIN = re.compile(r"[-+.\w]*")
_PLAIN_VALUE = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_MAX_PLAIN = 1000  # characters of a number
MAX_DEPTH = 200
"""Most brackets within one another: two of our frames each; the standard library's parser gives up at some 1000."""


def read_value(text: Text, give: Give, depth: int = 0) -> Reading[None]:
    """Read one JSON value and the white space before it; `give` gets its text as it comes.

    Raises:
        Malformed: it is none.
    """
    sign = yield from _next_sign(text, give)
    if sign == '"':
        yield from _string(text, give)
    elif sign not in "{[":
        yield from _plain(text, give)
    elif depth < MAX_DEPTH:
        yield from _members(text, give, depth + 1)
    else:
        raise Malformed


def _members(text: Text, give: Give, depth: int) -> Reading[None]:
    """An object, or a list."""
    closing = "}" if text.rest[0] == "{" else "]"
    give(text.read(1))
    sign = yield from _next_sign(text, give)
    while sign != closing:
        if closing == "}":
            if sign != '"':
                raise Malformed
            yield from _string(text, give)
            if (yield from _next_sign(text, give)) != ":":
                raise Malformed
            give(text.read(1))
        yield from read_value(text, give, depth)
        sign = yield from _next_sign(text, give)
        if sign == ",":
            give(text.read(1))
            sign = yield from _next_sign(text, give)
            if sign == closing:
                raise Malformed
        elif sign != closing:
            raise Malformed
    give(text.read(1))


def _next_sign(text: Text, give: Give) -> Reading[str]:
    """The next character that is no white space, which is not read; `give` gets the white space."""
    while (character := (yield from text.peek())) in _WHITE:
        _give_match(text, _SPACE, give)
    return character


def read_string(text: Text) -> Reading[str]:
    """Read a JSON string; returns what it says.

    Raises:
        Malformed: it is none.
    """
    if (yield from text.peek()) != '"':
        raise Malformed
    parts: list[str] = []
    yield from _string(text, parts.append)
    said: Any = json.loads("".join(parts))
    return str(said)


def _string(text: Text, give: Give) -> Reading[None]:
    give(text.read(1))
    while True:
        _give_match(text, _CHARACTERS, give)
        if text.rest.startswith('"'):
            give(text.read(1))
            return
        if text.rest and not _ESCAPE_BEGUN.fullmatch(text.rest):
            raise Malformed
        yield from text.wait()


def _plain(text: Text, give: Give) -> Reading[None]:
    """A number, true, false or null."""
    while True:
        match = _PLAIN.match(text.rest)
        length = 0 if match is None else match.end()
        if length > _MAX_PLAIN:
            raise Malformed
        if length < len(text.rest) or text.ended:
            break
        yield
    if not _PLAIN_VALUE.fullmatch(text.rest[:length]):
        raise Ended if text.ended and length == len(text.rest) else Malformed
    give(text.read(length))


def _give_match(text: Text, pattern: re.Pattern[str], give: Give) -> None:
    match = pattern.match(text.rest)
    if match is not None and match.end():
        give(text.read(match.end()))
