"""`deepseek_v3` (DeepSeek-V3, R1) and `deepseek_v31` (V3.1): calls within a section. The marks have other bars, and a
low block in place of spaces:

    <|tool calls begin|><|tool call begin|>function<|tool sep|>get_weather
    ```json
    {"city": "Paris"}
    ```<|tool call end|><|tool calls end|>

    <|tool calls begin|><|tool call begin|>get_weather<|tool sep|>{"city": "Paris"}<|tool call end|><|tool calls end|>
"""

from __future__ import annotations

from collections.abc import Callable

from serving.turns.json_calls import read_arguments
from serving.turns.marked import MarkedTurn
from serving.turns.reading import Reading


def _mark(name: str) -> str:
    return f"<|{name}|>".replace("|", "\uff5c").replace(" ", "\u2581")


SECTION, SECTION_END = _mark("tool calls begin"), _mark("tool calls end")
CALL, SEPARATOR, CALL_END = _mark("tool call begin"), _mark("tool sep"), _mark("tool call end")
MARKS = (SECTION, SECTION_END, CALL, SEPARATOR, CALL_END)


def read_v3(turn: MarkedTurn) -> Reading[None]:
    """Read content and calls of DeepSeek-V3."""
    yield from _read(turn, _call_v3)


def read_v31(turn: MarkedTurn) -> Reading[None]:
    """Read content and calls of DeepSeek-V3.1."""
    yield from _read(turn, _call_v31)


def _read(turn: MarkedTurn, call: Callable[[MarkedTurn], Reading[None]]) -> Reading[None]:
    while (mark := (yield from turn.prose((SECTION, CALL), turn.content))) is not None:
        yield from turn.attempt(_in_section(turn, mark, call), mark)


def _in_section(turn: MarkedTurn, mark: str, call: Callable[[MarkedTurn], Reading[None]]) -> Reading[None]:
    text = turn.text
    if mark == SECTION:
        yield from text.space()
        yield from text.expect(CALL)
    yield from call(turn)
    yield from text.space()
    yield from text.one_of(CALL_END)
    yield from text.space()
    yield from text.one_of(SECTION_END)


def _call_v3(turn: MarkedTurn) -> Reading[None]:
    text = turn.text
    name: list[str] = []
    yield from text.until((SEPARATOR,), lambda _: None)  # the kind, which is `function`
    yield from text.until(("\n",), name.append)
    yield from text.space()
    yield from text.expect("```json")
    yield from text.space()
    turn.call("".join(name))
    yield from read_arguments(turn)
    yield from text.space()
    yield from text.one_of("```")


def _call_v31(turn: MarkedTurn) -> Reading[None]:
    text = turn.text
    name: list[str] = []
    yield from text.until((SEPARATOR,), name.append)
    yield from text.space()
    turn.call("".join(name))
    yield from read_arguments(turn)
