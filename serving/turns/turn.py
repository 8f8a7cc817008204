"""The parts of an assistant's turn, and what reads them from text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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


class TurnParser(Protocol):
    """Reads one output's text. What it cannot read as reasoning or as a call is content: no text is lost."""

    @property
    def num_calls(self) -> int:
        """Tool calls that are complete."""

    @property
    def reasons(self) -> bool:
        """Whether the text so far ends within the reasoning."""

    def take(self, text: str) -> TurnDelta:
        """The parts that the output's next text completes. Text that may yet begin a marker is held back."""

    def finish(self) -> TurnDelta:
        """The parts of the text that was held back; called once, at the output's end."""


class PlainTurn:
    """A turn whose text is all content."""

    num_calls, reasons = 0, False

    def take(self, text: str) -> TurnDelta:
        """See `TurnParser`."""
        return TurnDelta(content=text)

    def finish(self) -> TurnDelta:
        """See `TurnParser`."""
        return TurnDelta()
