"""`granite` (Granite 3): a JSON list behind a mark.

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]

Granite 3.1 marks it as `<tool_call>`. A list at the turn's beginning needs no mark if it names functions of the
request.
"""

from __future__ import annotations

from serving.turns.json_calls import read_calls
from serving.turns.marked import MarkedTurn
from serving.turns.reading import Reading

MARKS = ("<|tool_call|>", "<tool_call>")


def read(turn: MarkedTurn) -> Reading[None]:
    """Read content and calls."""
    turn.content((yield from turn.text.space()))
    if turn.text.rest.startswith("["):
        yield from read_calls(turn, "", names=turn.tools)
    while (mark := (yield from turn.prose(MARKS, turn.content))) is not None:
        yield from read_calls(turn, mark)
