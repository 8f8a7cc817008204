"""`kimi_k2`: calls within a section; their ids have the function's name and the call's number in the conversation.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from serving.turns.json_calls import read_arguments
from serving.turns.marked import MarkedTurn
from serving.turns.reading import Reading

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKS = (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END)


def make_id(name: str, place: int) -> str:
    """The id as the model writes it."""
    return f"functions.{name}:{place}"


def read(turn: MarkedTurn) -> Reading[None]:
    """Read content and calls."""
    while (mark := (yield from turn.prose((SECTION, CALL), turn.content))) is not None:
        yield from turn.attempt(_call(turn, mark), mark)


def _call(turn: MarkedTurn, mark: str) -> Reading[None]:
    text = turn.text
    if mark == SECTION:
        yield from text.space()
        yield from text.expect(CALL)
    parts: list[str] = []
    yield from text.until((ARGUMENTS,), parts.append)
    call_id = "".join(parts).strip()
    name = call_id.removeprefix("functions.").partition(":")[0]
    yield from text.space()
    turn.call(name, call_id)
    yield from read_arguments(turn)
    yield from text.space()
    yield from text.one_of(CALL_END)
    yield from text.space()
    yield from text.one_of(SECTION_END)
