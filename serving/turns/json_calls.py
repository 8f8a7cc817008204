"""Reads calls that are JSON: an object with the function's name and its arguments, or a list of such objects."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from serving.turns.json_text import read_string, read_value
from serving.turns.marked import MarkedTurn
from serving.turns.reading import Give, Malformed, Reading

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
