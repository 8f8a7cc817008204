"""Stop strings, found in a text while it comes.

Knuth, Morris and Pratt's search: for each stop string one number is kept, how many characters at the end of the text
are its beginning. So the memory is linear in the strings, the work linear in the text, and the largest of these
numbers is what of the text may still become a stop string.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

from model_runner import RequestError

__all__ = ["MAX_STOP_CHARACTERS", "MAX_STOP_STRINGS", "StopMatcher", "check_stop_strings"]

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1000


def check_stop_strings(stop: Sequence[str]) -> None:
    """Refuse stop strings that cannot work, or that are too many or too long.

    Raises:
        RequestError: there is one.
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
    """Finds the stop string that is complete first in one text; of two complete at the same character, the longer one.

    Args:
        stop: the strings; none of them empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [(each, _borders(each)) for each in dict.fromkeys(stop)]
        self._matched = [0] * len(self._stop)

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, new: str, *, counts: bool = True) -> tuple[int, str] | None:
        """Go on by some characters.

        Args:
            new: the text after what was fed before.
            counts: a stop string that is complete in it ends the text; otherwise it is passed over.

        Returns:
            (characters of `new` up to its end, stop string) of the first that is complete; nothing may be fed after it.
        """
        found: tuple[int, str] | None = None
        for place in range(len(self._stop)):
            end = self._advance(place, new if found is None else new[: found[0]], counts)
            stop = self._stop[place][0]
            if end is not None and (found is None or (end, -len(stop)) < (found[0], -len(found[1]))):
                found = end, stop
        return found

    def _advance(self, place: int, new: str, counts: bool) -> int | None:
        """Where in `new` one stop string is complete for the first time, if it counts."""
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


@lru_cache(maxsize=4 * MAX_STOP_STRINGS)  # the outputs of a request have the same
def _borders(stop: str) -> array[int]:
    """For each beginning of a string: the length of its longest proper beginning that is also its end."""
    borders = array("I", [0])
    border = 0
    for character in stop[1:]:
        while border and stop[border] != character:
            border = borders[border - 1]
        border += stop[border] == character
        borders.append(border)
    return borders
