"""A turn whose parts are marked in its text. What the marks look like is a format's business: see `formats`.

A call is passed on once its arguments begin, if the turn is streamed, else when it is complete. A call that breaks off,
or turns out to be none, is content: all of its text, mark included. So content is the same whether or not the turn is
streamed; a stream has the beginning of such a call besides, which cannot be taken back.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from serving.turns.reading import Ended, Give, Malformed, Reading, Text


@dataclass(frozen=True)
class ToolCallDelta:
    """The new part of a tool call.

    Attributes:
        index: the call's place among the turn's calls, from 0.
        id: the call's id; in its first part only, like `name`.
        name: the function's name.
        arguments: the next characters of the arguments' JSON text; empty in the first part.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class TurnDelta:
    """The new part of a turn."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class TurnParser:
    """Reads one output's text. What it cannot read as reasoning or as a call is content: no text is lost.

    This one reads all of it as content.

    Attributes:
        num_calls: tool calls that are complete.
        reasons: whether the text so far ends within the reasoning.
    """

    num_calls: int = 0
    reasons: bool = False

    def take(self, text: str) -> TurnDelta:
        """The parts that the output's next text completes. Text that may yet begin a marker is held back."""
        return TurnDelta(content=text)

    def finish(self) -> TurnDelta:
        """The parts of the text that was held back; called once, at the output's end."""
        return TurnDelta()


MakeId = Callable[[str, int], str]
"""A call's id, from the function's name and the call's place in the conversation."""


@dataclass
class _Call:
    """The call that is read now."""

    id: str
    name: str
    index: int
    arguments: list[str] = field(default_factory=list)
    told: bool = False


class MarkedTurn(TurnParser):
    """Reads one output's text; see `TurnParser`.

    Args:
        read: reads the whole turn.
        make_id: makes ids of calls whose format has none.
        tools: the schema of each function's parameters, by the function's name.
        streamed: pass calls on as they come.
        most_calls: calls beyond these are left out; None for no limit.
        hidden: marks that are special tokens; content has none.

    Attributes:
        text: what the readers read.
        tools: as given.
    """

    def __init__(
        self,
        read: Callable[[MarkedTurn], Reading[None]],
        *,
        make_id: MakeId,
        tools: Mapping[str, Mapping[str, Any]],
        streamed: bool = True,
        most_calls: int | None = None,
        hidden: Collection[str] = (),
    ) -> None:
        self.text = Text()
        self.tools = tools
        self._num_begun = 0
        self._make_id = make_id
        self._streamed = streamed
        self._most_calls = most_calls
        self._hidden = tuple(hidden)
        self._call: _Call | None = None
        self._blank: str | None = ""  # white space around calls, which is no content; None within content
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._reading = read(self)
        next(self._reading, None)

    def take(self, text: str) -> TurnDelta:
        """See `TurnParser`."""
        self.text.rest += text
        next(self._reading, None)
        return self._new()

    def finish(self) -> TurnDelta:
        """See `TurnParser`."""
        self.text.ended = True
        for _ in self._reading:
            pass
        if self._blank and not self.num_calls:
            self._content.append(self._blank)
        return self._new()

    # What readers use.

    def prose(self, marks: Collection[str], give: Give) -> Reading[str | None]:
        """Read up to the first of some marks, and the mark; None if the text ends first. `give` gets what is before."""
        words = [*marks, *self._hidden]
        try:
            while (found := (yield from self.text.until(words, give))) not in marks:
                pass
        except Ended:
            return None
        return found

    def content(self, text: str) -> None:
        """Content that was read. White space alone counts with what follows it, unless this is a call."""
        for mark in self._hidden:
            text = text.replace(mark, "")
        if self._blank is not None:
            text = self._blank + text
            self._blank = text if not text.strip() else None
        if self._blank is None:
            self._content.append(text)

    def reasoning(self, text: str) -> None:
        """Reasoning that was read."""
        self._reasoning.append(text)

    def call(self, name: str, call_id: str | None = None) -> None:
        """The name of a call that was read, within `attempt`.

        Raises:
            Malformed: it is no name.
        """
        name = name.strip()
        if not name or any(character.isspace() for character in name):
            raise Malformed
        made = self._make_id(name, self._num_begun) if call_id is None else call_id
        self._call = _Call(made, name, self._num_begun)

    def arguments(self, text: str) -> None:
        """The next piece of that call's arguments."""
        if (call := self._call) is not None:
            call.arguments.append(text)
            if call.told:
                self._calls.append(ToolCallDelta(call.index, arguments=text))
            elif self._streamed:
                self._tell()

    def attempt(self, reading: Reading[None], mark: str) -> Reading[bool]:
        """Read one call, which says `call` and `arguments`; returns whether it is one. Else its text is content.

        Args:
            mark: what was read just before, which is part of the call.
        """
        self.text.keep(mark)
        self._call = None
        try:
            yield from reading
        except Malformed:
            self._call = None
            self.content(self.text.kept())
            return False
        self.text.kept()
        self._tell()
        self._call = None
        self.num_calls += 1
        self._blank = ""
        return True

    def _tell(self) -> None:
        """Pass the call on, as far as it was read."""
        call = self._call
        if call is None or call.told or (self._most_calls is not None and self.num_calls >= self._most_calls):
            return
        self._num_begun += 1
        call.told = True
        self._calls.append(ToolCallDelta(call.index, call.id, call.name))
        if call.arguments:
            self._calls.append(ToolCallDelta(call.index, arguments="".join(call.arguments)))

    def _new(self) -> TurnDelta:
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        calls = tuple(_joined(self._calls))
        self._content, self._reasoning, self._calls = [], [], []
        return TurnDelta(content, reasoning, calls)


def _joined(parts: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """Pieces of arguments that follow one another are one; the first part of a call stays alone."""
    joined: list[ToolCallDelta] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and part.name is None and last.name is None and last.index == part.index:
            joined[-1] = ToolCallDelta(part.index, arguments=last.arguments + part.arguments)
        else:
            joined.append(part)
    return joined


def random_id(name: str, place: int) -> str:
    """A call's id where the format has none of its own."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class CallFormat:
    """How a family writes tool calls.

    Attributes:
        read: reads content and calls.
        marks: what marks them; where one is a special token, the parser must see its text.
        make_id: makes ids of calls that have none.
    """

    read: Callable[[MarkedTurn], Reading[None]]
    marks: tuple[str, ...]
    make_id: MakeId = random_id
