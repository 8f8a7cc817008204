"""`llama3_json` (Llama 3.1, 3.2): the turn is a JSON object, or several with semicolons between them.

    {"name": "get_weather", "parameters": {"city": "Paris"}}

Only an object that names a function of the request, and has arguments, is a call: others are an answer in JSON.
"""

from __future__ import annotations

from serving.turns.json_calls import read_call
from serving.turns.marked import MarkedTurn
from serving.turns.reading import Reading

PYTHON = "<|python_tag|>"
MARKS = (PYTHON,)


def read(turn: MarkedTurn) -> Reading[None]:
    """Read content and calls."""
    text = turn.text
    turn.content((yield from text.space()))
    if text.rest.startswith("{"):
        yield from _calls(turn, "")
    while (mark := (yield from turn.prose((PYTHON,), turn.content))) is not None:
        yield from _calls(turn, mark)


def _calls(turn: MarkedTurn, mark: str) -> Reading[None]:
    while (yield from turn.attempt(read_call(turn, names=turn.tools), mark)):
        yield from turn.text.space()
        separator = yield from turn.text.one_of(";", PYTHON)
        if separator is None:
            return
        mark = separator
