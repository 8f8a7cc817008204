"""Reads the reasoning at the beginning of a turn: the text between two marks."""

from __future__ import annotations

from dataclasses import dataclass

from serving.turns.marked import MarkedTurn
from serving.turns.reading import Reading


@dataclass(frozen=True)
class Before:
    """What comes before a turn: it says whether the reasoning has begun, or is over.

    Attributes:
        prompt: the prompt's text, of which the end counts.
        continued: the message that the turn continues; None if it begins one.
    """

    prompt: str = ""
    continued: str | None = None


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family marks its reasoning.

    Attributes:
        begin: the mark before it, which the prompt may end with.
        end: the mark behind it.
        assumed: the turn begins within the reasoning, unless the prompt ends it.
    """

    begin: str = "<think>"
    end: str = "</think>"
    assumed: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks."""
        return self.begin, self.end

    def has_begun(self, before: Before) -> bool:
        """Whether the turn begins within the reasoning."""
        if before.continued is not None:
            return before.continued.rfind(self.begin) > before.continued.rfind(self.end)
        prompt = before.prompt.rstrip()
        return prompt.endswith(self.begin) or (self.assumed and not prompt.endswith(self.end))

    def is_over(self, before: Before) -> bool:
        """Whether the turn begins behind the reasoning."""
        ended = before.continued is not None or before.prompt.rstrip().endswith(self.end)
        return ended and not self.has_begun(before)

    def read(self, turn: MarkedTurn, before: Before) -> Reading[None]:
        """Read the reasoning, if the turn begins with it. Without its end, all of the turn is reasoning."""
        begun = turn.reasons = self.has_begun(before)
        if self.is_over(before):
            return
        space = yield from turn.text.space()
        marked = (yield from turn.text.one_of(self.begin)) is not None
        if not marked and not begun:
            turn.content(space)
            return
        if not marked:
            turn.reasoning(space)
        turn.reasons = True
        yield from turn.prose((self.end,), turn.reasoning)
        turn.reasons = False
