"""Formats whose calls are JSON, behind a mark or alone, and the calls that a request forces (`tool_choice`).

`hermes` (Hermes 2 Pro, Qwen2.5, Qwen3): a JSON object between two marks.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

`llama3_json` (Llama 3.1, 3.2): the turn is a JSON object, or several with semicolons between them. Only an object that
names a function of the request, and has arguments, is a call: others are an answer in JSON.

    {"name": "get_weather", "parameters": {"city": "Paris"}}

`mistral`: a mark, then a JSON list; or, since Mistral Small 3, the function's name and its arguments. Mistral's
templates want ids of nine letters and digits.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}

`granite` (Granite 3): a JSON list behind a mark, `<tool_call>` in Granite 3.1. A list at the turn's beginning needs no
mark if it names functions of the request.

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]

Forced calls have the form that structured outputs give them:

    required    [{"name": "get_weather", "parameters": {"city": "Paris"}}, ...]
    named       {"city": "Paris"}
"""

import re
import secrets
import string

from serving.turns.json_calls import read_arguments, read_call, read_calls
from serving.turns.marked import CallFormat, MarkedTurn
from serving.turns.reading import Reading

_BEGIN, _END = _HERMES_MARKS = ("<tool_call>", "</tool_call>")
_PYTHON = "<|python_tag|>"
TOOL_CALLS, _ARGUMENTS, _CALL_ID = _MISTRAL_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_NAME = re.compile(r"[\w.-]*")
_LETTERS = string.ascii_letters + string.digits
_GRANITE_MARKS = ("<|tool_call|>", "<tool_call>")


def _read_hermes(turn: MarkedTurn) -> Reading[None]:
    while (mark := (yield from turn.prose((_BEGIN,), turn.content))) is not None:
        yield from turn.attempt(_hermes_call(turn), mark)


def _hermes_call(turn: MarkedTurn) -> Reading[None]:
    yield from read_call(turn)
    yield from turn.text.space()
    yield from turn.text.one_of(_END)


def _read_llama3(turn: MarkedTurn) -> Reading[None]:
    text = turn.text
    turn.content((yield from text.space()))
    if text.rest.startswith("{"):
        yield from _llama3_calls(turn, "")
    while (mark := (yield from turn.prose((_PYTHON,), turn.content))) is not None:
        yield from _llama3_calls(turn, mark)


def _llama3_calls(turn: MarkedTurn, mark: str) -> Reading[None]:
    while (yield from turn.attempt(read_call(turn, names=turn.tools), mark)):
        yield from turn.text.space()
        separator = yield from turn.text.one_of(";", _PYTHON)
        if separator is None:
            return
        mark = separator


def _nine_letters(name: str, place: int) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def _read_mistral(turn: MarkedTurn) -> Reading[None]:
    while (mark := (yield from turn.prose((TOOL_CALLS,), turn.content))) is not None:
        mark += yield from turn.text.space()
        if turn.text.rest.startswith("["):
            yield from read_calls(turn, mark)
        else:
            yield from turn.attempt(_mistral_call(turn), mark)


def _mistral_call(turn: MarkedTurn) -> Reading[None]:
    text = turn.text
    name = yield from text.run(_NAME)
    call_id = None
    if (yield from text.one_of(_CALL_ID)) is not None:
        call_id = (yield from text.run(_NAME)) or None
    yield from text.one_of(_ARGUMENTS)
    yield from text.space()
    turn.call(name, call_id)
    yield from read_arguments(turn)


def _read_granite(turn: MarkedTurn) -> Reading[None]:
    turn.content((yield from turn.text.space()))
    if turn.text.rest.startswith("["):
        yield from read_calls(turn, "", names=turn.tools)
    while (mark := (yield from turn.prose(_GRANITE_MARKS, turn.content))) is not None:
        yield from read_calls(turn, mark)


HERMES = CallFormat(_read_hermes, _HERMES_MARKS)
LLAMA3 = CallFormat(_read_llama3, (_PYTHON,))
MISTRAL = CallFormat(_read_mistral, _MISTRAL_MARKS, _nine_letters)
GRANITE = CallFormat(_read_granite, _GRANITE_MARKS)


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
        yield from turn.attempt(_named_call(turn, name), "")
    yield from turn.prose((), turn.content)


def _named_call(turn: MarkedTurn, name: str) -> Reading[None]:
    turn.call(name)
    yield from read_arguments(turn)
