"""`hermes` (Hermes 2 Pro, Qwen2.5, Qwen3): a JSON object between two marks.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from serving.turns.json_calls import read_call
from serving.turns.marked import MarkedTurn
from serving.turns.reading import Reading

BEGIN, END = MARKS = ("<tool_call>", "</tool_call>")


def read(turn: MarkedTurn) -> Reading[None]:
    """Read content and calls."""
    while (mark := (yield from turn.prose((BEGIN,), turn.content))) is not None:
        yield from turn.attempt(_call(turn), mark)


def _call(turn: MarkedTurn) -> Reading[None]:
    yield from read_call(turn)
    yield from turn.text.space()
    yield from turn.text.one_of(END)
