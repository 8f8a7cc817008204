"""Formats whose calls lie within a section: each has marks of its own, and the section has marks around them all.

`deepseek_v3` (DeepSeek-V3, R1) and `deepseek_v31` (V3.1). The marks have other bars, and a low block in place of
spaces:

    <|tool calls begin|><|tool call begin|>function<|tool sep|>get_weather
    ```json
    {"city": "Paris"}
    ```<|tool call end|><|tool calls end|>

    <|tool calls begin|><|tool call begin|>get_weather<|tool sep|>{"city": "Paris"}<|tool call end|><|tool calls end|>

`kimi_k2`: the ids of calls have the function's name and the call's number in the conversation.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}
    <|tool_call_end|><|tool_calls_section_end|>
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from serving.turns.json_calls import read_arguments
from serving.turns.marked import CallFormat, MarkedTurn
from serving.turns.reading import Reading


@dataclass(frozen=True)
class Section:
    """The marks of a section and of its calls. Models may leave out the section's, and those that end something."""

    begin: str
    end: str
    call: str
    call_end: str

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks."""
        return self.begin, self.end, self.call, self.call_end

    def read(self, turn: MarkedTurn, call: Callable[[MarkedTurn], Reading[None]]) -> Reading[None]:
        """Read content and calls; `call` reads what is between a call's marks."""
        while (mark := (yield from turn.prose((self.begin, self.call), turn.content))) is not None:
            yield from turn.attempt(self._marked(turn, mark, call), mark)

    def _marked(self, turn: MarkedTurn, mark: str, call: Callable[[MarkedTurn], Reading[None]]) -> Reading[None]:
        text = turn.text
        if mark == self.begin:
            yield from text.space()
            yield from text.expect(self.call)
        yield from call(turn)
        for end in (self.call_end, self.end):
            yield from text.space()
            yield from text.one_of(end)


def _mark(name: str) -> str:
    return f"<|{name}|>".replace("|", "\uff5c").replace(" ", "\u2581")


DEEPSEEK = Section(*map(_mark, ("tool calls begin", "tool calls end", "tool call begin", "tool call end")))
SEPARATOR = _mark("tool sep")
KIMI = Section("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"


def _v3_call(turn: MarkedTurn) -> Reading[None]:
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


def _v31_call(turn: MarkedTurn) -> Reading[None]:
    text = turn.text
    name, _ = yield from text.up_to(SEPARATOR)
    yield from text.space()
    turn.call(name)
    yield from read_arguments(turn)


def _kimi_call(turn: MarkedTurn) -> Reading[None]:
    text = turn.text
    call_id, _ = yield from text.up_to(_KIMI_ARGUMENTS)
    call_id = call_id.strip()
    name = call_id.removeprefix("functions.").partition(":")[0]
    yield from text.space()
    turn.call(name, call_id)
    yield from read_arguments(turn)


def _kimi_id(name: str, place: int) -> str:
    """The id as the model writes it."""
    return f"functions.{name}:{place}"


DEEPSEEK_V3, DEEPSEEK_V31 = (
    CallFormat(partial(DEEPSEEK.read, call=call), (*DEEPSEEK.marks, SEPARATOR)) for call in (_v3_call, _v31_call)
)
KIMI_K2 = CallFormat(partial(KIMI.read, call=_kimi_call), (*KIMI.marks, _KIMI_ARGUMENTS), _kimi_id)
