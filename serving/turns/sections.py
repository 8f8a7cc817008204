"""Calls within a section: each has marks of its own, and the section has marks around them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from serving.turns.marked import MarkedTurn
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
