"""Reads JSON from a text that arrives in pieces. What was passed on is the beginning of valid JSON at any time."""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Any

from serving.turns.reading import Ended, Give, Malformed, Reading, Text

_WHITE = " \t\n\r"
_SPACE = re.compile(f"[{_WHITE}]*")
_CHARACTERS = re.compile(r'(?:[^"\\\x00-\x1f]+|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_PLAIN = re.compile(r"[-+.\w]*")
_PLAIN_VALUE = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_MAX_PLAIN = 1000  # characters of a number
MAX_DEPTH = 200
"""Most brackets within one another; the standard library's parser gives up at some 1000."""


class _Next(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


def read_value(text: Text, give: Give) -> Reading[None]:
    """Read one JSON value; `give` gets its text as it comes.

    Raises:
        Malformed: it is none.
    """
    closing: list[str] = []
    expected = _Next.VALUE
    while True:
        character = yield from text.peek()
        if character in _WHITE:
            _give_match(text, _SPACE, give)
            continue
        if closing and character == closing[-1] and expected not in (_Next.VALUE, _Next.KEY, _Next.COLON):
            give(text.read(1))
            closing.pop()
            expected = _Next.COMMA_OR_END
        elif expected in (_Next.VALUE, _Next.VALUE_OR_END) and character in "{[":
            give(text.read(1))
            closing.append("}" if character == "{" else "]")
            expected = _Next.KEY_OR_END if character == "{" else _Next.VALUE_OR_END
            if len(closing) > MAX_DEPTH:
                raise Malformed
        elif expected in (_Next.VALUE, _Next.VALUE_OR_END):
            yield from (_string(text, give) if character == '"' else _plain(text, give))
            expected = _Next.COMMA_OR_END
        elif expected in (_Next.KEY, _Next.KEY_OR_END) and character == '"':
            yield from _string(text, give)
            expected = _Next.COLON
        elif expected is _Next.COLON and character == ":":
            give(text.read(1))
            expected = _Next.VALUE
        elif expected is _Next.COMMA_OR_END and character == ",":
            give(text.read(1))
            expected = _Next.KEY if closing[-1] == "}" else _Next.VALUE
        else:
            raise Malformed
        if not closing and expected is _Next.COMMA_OR_END:
            return


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
