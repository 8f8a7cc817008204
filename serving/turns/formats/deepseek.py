"""`deepseek_v3` (DeepSeek-V3, R1) and `deepseek_v31` (V3.1): calls within a section. The marks have other bars, and a
low block in place of spaces:

    <|tool calls begin|><|tool call begin|>function<|tool sep|>get_weather
    ```json
    {"city": "Paris"}
    ```<|tool call end|><|tool calls end|>

    <|tool calls begin|><|tool call begin|>get_weather<|tool sep|>{"city": "Paris"}<|tool call end|><|tool calls end|>
"""

from __future__ import annotations

from functools import partial

from serving.turns.json_calls import read_arguments
from serving.turns.marked import MarkedTurn
from serving.turns.reading import Reading
from serving.turns.sections import Section


def _mark(name: str) -> str:
    return f"<|{name}|>".replace("|", "\uff5c").replace(" ", "\u2581")


SEPARATOR = _mark("tool sep")
SECTION = Section(*map(_mark, ("tool calls begin", "tool calls end", "tool call begin", "tool call end")))
MARKS = (*SECTION.marks, SEPARATOR)


def _call_v3(turn: MarkedTurn) -> Reading[None]:
    text = turn.text
    yield from text.up_to(SEPARATOR)  # the kind, which is `function`
    name, _ = yield from text.up_to("\n")
    yield from text.space()
    yield from text.expect("```json")
    yield from text.space()
    turn.call(name)
    yield from read_arguments(turn)
    yield from text.space()
    yield from text.one_of("```")


def _call_v31(turn: MarkedTurn) -> Reading[None]:
    text = turn.text
    name, _ = yield from text.up_to(SEPARATOR)
    yield from text.space()
    turn.call(name)
    yield from read_arguments(turn)


read_v3, read_v31 = (partial(SECTION.read, call=call) for call in (_call_v3, _call_v31))
"""Read content and calls of DeepSeek-V3, and of V3.1."""
