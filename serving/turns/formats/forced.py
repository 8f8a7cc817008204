"""Calls that the request forces (`tool_choice`), in the form that structured outputs give them.

required    [{"name": "get_weather", "parameters": {"city": "Paris"}}, ...]
named       {"city": "Paris"}
"""

from __future__ import annotations

from serving.turns.json_calls import read_arguments, read_calls
from serving.turns.marked import MarkedTurn
from serving.turns.reading import Reading


def read_required(turn: MarkedTurn) -> Reading[None]:
    """Read a list of calls; what follows is content."""
    turn.content((yield from turn.text.space()))
    if turn.text.rest:
        yield from read_calls(turn, "", keys=("parameters",), names=turn.tools)
    yield from turn.prose((), turn.content)


def read_named(turn: MarkedTurn, name: str) -> Reading[None]:
    """Read the arguments of a call of this function; what follows is content."""
    turn.content((yield from turn.text.space()))
    if turn.text.rest:
        yield from turn.attempt(_call(turn, name), "")
    yield from turn.prose((), turn.content)


def _call(turn: MarkedTurn, name: str) -> Reading[None]:
    turn.call(name)
    yield from read_arguments(turn)
