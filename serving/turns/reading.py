"""A text that is read while it arrives.

What reads it is a generator: it reads what is there, and yields where it needs more. So a format is written down as if
its text were complete, and works for any cut of the text into pieces.
"""

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

_T = TypeVar("_T")
Reading = Generator[None, None, _T]
"""Yields where it needs more text; returns what it has read."""
Give = Callable[[str], None]
"""Takes the next piece of a text."""

_SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """The text is not what its reader expects."""


class Ended(Malformed):
    """The text has ended where its reader expects more."""


class Text:
    """The part of a text that has come and was not read yet.

    Attributes:
        rest: that part; what comes is appended to it.
        ended: nothing will follow it.
    """

    def __init__(self) -> None:
        self.rest = ""
        self.ended = False
        self._kept: list[str] | None = None

    def keep(self, before: str) -> None:
        """Keep what is read from now on, for `kept`. `before`: what was read just now."""
        self._kept = [before]

    def kept(self) -> str:
        """The text since `keep`, which ends with this."""
        kept, self._kept = "".join(self._kept or ()), None
        return kept

    def read(self, count: int) -> str:
        """Read so many characters of `rest`."""
        text, self.rest = self.rest[:count], self.rest[count:]
        if self._kept is not None:
            self._kept.append(text)
        return text

    def wait(self) -> Reading[None]:
        """Wait for more text.

        Raises:
            Ended: there will be none.
        """
        if self.ended:
            raise Ended
        yield

    def peek(self) -> Reading[str]:
        """The next character, which is not read."""
        while not self.rest:
            yield from self.wait()
        return self.rest[0]

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read the characters that a pattern matches, up to another one or the end."""
        parts: list[str] = []
        while True:
            match = pattern.match(self.rest)
            parts.append(self.read(match.end() if match else 0))
            if self.rest or self.ended:
                return "".join(parts)
            yield

    def space(self) -> Reading[str]:
        """Read white space."""
        return (yield from self.run(_SPACE))

    def one_of(self, *words: str) -> Reading[str | None]:
        """Read the word with which the text goes on; None, with nothing read, if it is none of these."""
        while True:
            found = max((word for word in words if self.rest.startswith(word)), key=len, default=None)
            begun = any(len(word) > len(self.rest) and word.startswith(self.rest) for word in words)
            if self.ended or not begun:
                if found is not None:
                    self.read(len(found))
                return found
            yield

    def expect(self, *words: str) -> Reading[str]:
        """As `one_of`.

        Raises:
            Malformed: it is none of these.
        """
        found = yield from self.one_of(*words)
        if found is None:
            raise Ended if self.ended and not self.rest else Malformed
        return found

    def until(self, words: Sequence[str], give: Give) -> Reading[str]:
        """Read up to the first of some words, none of which begins with another, and the word.

        Args:
            give: gets the text before it, as it comes, but for an end that may begin one of the words.

        Raises:
            Ended: none has come; `give` has got the rest.
        """
        pattern = _any_of(tuple(words))
        while True:
            match = pattern.search(self.rest)
            held = 0 if self.ended else _begun(self.rest, words)
            if match is not None and match.start() < len(self.rest) - held:
                if before := self.read(match.start()):
                    give(before)
                return self.read(len(match[0]))
            if before := self.read(len(self.rest) - held):
                give(before)
            yield from self.wait()

    def up_to(self, *words: str) -> Reading[tuple[str, str]]:
        """The text before the first of some words, and the word; see `until`.

        Raises:
            Ended: none has come.
        """
        parts: list[str] = []
        found = yield from self.until(words, parts.append)
        return "".join(parts), found


@lru_cache(maxsize=256)
def _any_of(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, words)) or "(?!)")


def _begun(text: str, words: Sequence[str]) -> int:
    """Characters at the end of a text that may be the beginning of one of the words."""
    longest = max(map(len, words), default=1)
    for count in range(min(longest - 1, len(text)), 0, -1):
        end = text[-count:]
        if any(len(word) > count and word.startswith(end) for word in words):
            return count
    return 0
