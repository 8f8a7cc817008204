"""`kimi_k2`: calls within a section; their ids have the function's name and the call's number in the conversation.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from functools import partial

from serving.turns.json_calls import read_arguments
from serving.turns.marked import MarkedTurn
from serving.turns.reading import Reading
from serving.turns.sections import Section

ARGUMENTS = "<|tool_call_argument_begin|>"
SECTION = Section(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"
)
MARKS = (*SECTION.marks, ARGUMENTS)


def make_id(name: str, place: int) -> str:
    """The id as the model writes it."""
    return f"functions.{name}:{place}"


def _call(turn: MarkedTurn) -> Reading[None]:
    text = turn.text
    call_id, _ = yield from text.up_to(ARGUMENTS)
    call_id = call_id.strip()
    name = call_id.removeprefix("functions.").partition(":")[0]
    yield from text.space()
    turn.call(name, call_id)
    yield from read_arguments(turn)


read = partial(SECTION.read, call=_call)
"""Read content and calls."""
