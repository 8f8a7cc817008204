"""`glm45` (GLM-4.5, 4.6, 4.7): parameters as text between tags.

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>
"""

from __future__ import annotations

from serving.turns.marked import MarkedTurn
from serving.turns.reading import Reading
from serving.turns.typed_values import ArgumentsWriter

BEGIN, END = MARKS = ("<tool_call>", "</tool_call>")
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def read(turn: MarkedTurn) -> Reading[None]:
    """Read content and calls."""
    while (mark := (yield from turn.prose((BEGIN,), turn.content))) is not None:
        yield from turn.attempt(_call(turn), mark)


def _call(turn: MarkedTurn) -> Reading[None]:
    text = turn.text
    yield from text.space()
    name, found = yield from text.up_to("\n", _KEY, END)
    name = name.strip()
    turn.call(name)
    arguments = ArgumentsWriter(turn, name)
    if found == "\n":
        yield from text.space()
        found = yield from text.expect(_KEY, END)
    while found == _KEY:
        key, _ = yield from text.up_to(_KEY_END)
        yield from text.space()
        yield from text.expect(_VALUE)
        value = arguments.value(key.strip())
        yield from text.until((_VALUE_END,), value.add)
        value.close()
        yield from text.space()
        found = yield from text.expect(_KEY, END)
    arguments.close()
