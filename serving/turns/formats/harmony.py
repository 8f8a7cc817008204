"""`openai` (gpt-oss): the harmony format, in which a turn is several messages, each in a channel.

    <|channel|>analysis<|message|>They ask for the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": ...}<|call|>

Analysis is reasoning, a message to a function is a call, and the others are content. The library of the format,
`openai_harmony`, reads tokens, and loads its vocabulary from the net at first use; the text has all that is needed.
"""

import re

from serving.turns.json_calls import read_arguments
from serving.turns.marked import CallFormat, MarkedTurn
from serving.turns.reading import Ended, Reading

_START, CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")


def _read(turn: MarkedTurn) -> Reading[None]:
    """Read a turn's messages. Text that does not begin one is content."""
    text = turn.text
    found: str | None = ""
    while found is not None:
        space = "" if found == _START else (yield from text.space())
        first = _START if found == _START else (yield from text.one_of(_START, CHANNEL, "to="))
        if first is None:
            turn.content(space)
            found = yield from turn.prose((*_ENDS, _START), turn.content)
            continue
        header = [first]
        try:
            yield from text.until((_MESSAGE,), header.append)
        except Ended:
            turn.content("".join(header))
            return
        found = yield from _message(turn, "".join(header))


def _message(turn: MarkedTurn, header: str) -> Reading[str | None]:
    """Read a message; returns the mark at its end."""
    channel, function = _CHANNEL.search(header), _FUNCTION.search(header)
    if function is not None:
        yield from turn.attempt(_call(turn, function[1]), header + _MESSAGE)
        return ""
    turn.reasons = channel is not None and channel[1] == "analysis"
    found = yield from turn.prose((*_ENDS, _START), turn.reasoning if turn.reasons else turn.content)
    turn.reasons = False
    return found


def _call(turn: MarkedTurn, name: str) -> Reading[None]:
    text = turn.text
    yield from text.space()
    turn.call(name)
    yield from read_arguments(turn)
    yield from text.space()
    yield from text.one_of(*_ENDS)


OPENAI = CallFormat(_read, (_START, CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS))
