"""`mistral`: a mark, then a JSON list; or, since Mistral Small 3, the function's name and its arguments.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}

Mistral's templates want ids of nine letters and digits.
"""

from __future__ import annotations

import re
import secrets
import string

from serving.turns.json_calls import read_arguments, read_calls
from serving.turns.marked import MarkedTurn
from serving.turns.reading import Reading

BEGIN, ARGUMENTS, CALL_ID = MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_NAME = re.compile(r"[\w.-]*")
_LETTERS = string.ascii_letters + string.digits


def make_id(name: str, place: int) -> str:
    """Nine random letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def read(turn: MarkedTurn) -> Reading[None]:
    """Read content and calls."""
    while (mark := (yield from turn.prose((BEGIN,), turn.content))) is not None:
        mark += yield from turn.text.space()
        if turn.text.rest.startswith("["):
            yield from read_calls(turn, mark)
        else:
            yield from turn.attempt(_call(turn), mark)


def _call(turn: MarkedTurn) -> Reading[None]:
    text = turn.text
    name = yield from text.run(_NAME)
    call_id = None
    if (yield from text.one_of(CALL_ID)) is not None:
        call_id = (yield from text.run(_NAME)) or None
    yield from text.one_of(ARGUMENTS)
    yield from text.space()
    turn.call(name, call_id)
    yield from read_arguments(turn)
