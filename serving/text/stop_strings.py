"""Finds stop strings in a text while it is generated.

Uses the search of Knuth, Morris and Pratt: for each stop string, one number says how many characters at the end of the
text match its beginning. So memory is linear in the strings, and work is linear in the text. The largest of these
numbers is the length of text to hold back, because it may still become a stop string.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

from model_runner import RequestError

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1000


def check_stop_strings(stop: Sequence[str]) -> None:
    """Check the stop strings' number, types and lengths.

    Raises:
        RequestError: there are too many, or one is empty, too long or not a string.
    """
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are taken.")
    for each in stop:
        if not isinstance(each, str):
            raise RequestError(f"stop must be strings, not {each!r}.")
        if not each:
            raise RequestError("a stop string is empty; it would stop before anything.")
        if len(each) > MAX_STOP_CHARACTERS:
            raise RequestError(f"a stop string has {len(each)} characters; it may have {MAX_STOP_CHARACTERS} at most.")


class StopMatcher:
    """Finds the first complete stop string in one text; of two complete at the same character, the longer one.

    None of them may be empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [(each, _borders(each)) for each in dict.fromkeys(stop)]
        self._matched = [0] * len(self._stop)

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, new: str, *, counts: bool = True) -> tuple[int, str] | None:
        """Search the next piece of the text.

        Args:
            counts: report stop strings that are complete in this piece; otherwise ignore them.

        Returns:
            (end of the stop string in `new`, stop string) of the first complete one, after which nothing may be fed;
            None if there is none.
        """
        found: tuple[int, str] | None = None
        for place in range(len(self._stop)):
            end = self._advance(place, new if found is None else new[: found[0]], counts)
            stop = self._stop[place][0]
            if end is not None and (found is None or (end, -len(stop)) < (found[0], -len(found[1]))):
                found = end, stop
        return found

    def _advance(self, place: int, new: str, counts: bool) -> int | None:
        """The end in `new` of the first match of one stop string; None if there is none or `counts` is False."""
        (stop, borders), matched = self._stop[place], self._matched[place]
        if not matched and stop[0] not in new:
            return None
        for end, character in enumerate(new, 1):
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                if counts:
                    return end
                matched = borders[-1]
        self._matched[place] = matched
        return None


@lru_cache(maxsize=4 * MAX_STOP_STRINGS)  # all outputs of a request have the same stop strings
def _borders(stop: str) -> array[int]:
    """For each prefix of a string: the length of its longest proper prefix that is also a suffix (KMP's table)."""
    borders = array("I", [0])
    border = 0
    for character in stop[1:]:
        while border and stop[border] != character:
            border = borders[border - 1]
        border += stop[border] == character
        borders.append(border)
    return borders
