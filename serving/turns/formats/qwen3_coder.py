"""`qwen3_coder` (Qwen3-Coder, Qwen3.5): parameters as text between tags.

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from serving.turns.marked import MarkedTurn
from serving.turns.reading import Malformed, Reading
from serving.turns.typed_values import ArgumentsWriter

BEGIN, END = MARKS = ("<tool_call>", "</tool_call>")
_FUNCTION, _FUNCTION_END, _PARAMETER = "<function=", "</function>", "<parameter="
_VALUE_ENDS = ("\n</parameter>", "</parameter>")


def read(turn: MarkedTurn) -> Reading[None]:
    """Read content and calls; some models leave out the outer mark."""
    while (mark := (yield from turn.prose((BEGIN, _FUNCTION), turn.content))) is not None:
        yield from turn.attempt(_call(turn, mark), mark)


def _call(turn: MarkedTurn, mark: str) -> Reading[None]:
    text = turn.text
    if mark == BEGIN:
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
    yield from text.one_of(END)


def _name(turn: MarkedTurn) -> Reading[str]:
    name, end = yield from turn.text.up_to(">", "\n")
    if end != ">":
        raise Malformed
    return name
