"""Drafts by prompt lookup: what followed the last tokens when they occurred before.

The longest run of last tokens, between `longest` and `shortest`, that stands earlier in the sequence; of several the
most recent. What followed it is the draft. Where that reaches the end of the sequence it goes on with itself, so a
sequence that repeats is drafted as far as asked.

An index per sequence, from its runs of `shortest` tokens to where they stand, takes each token in once; a longer run is
found by walking the places of its end. Rescanning would cost the whole context at every step.

Source: prompt lookup decoding (Saxena, 2023).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from model_runner.speculation.proposer import Draft
from model_runner.step.request import Request

__all__ = ["NgramIndex", "NgramProposer"]


class NgramProposer:
    """Drafts by prompt lookup, a chain for every request; needs nothing of the model. See `Proposer`.

    Args:
        shortest: tokens of the shortest run that is looked up, at least 1.
        longest: of the longest.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._indices: dict[Request, NgramIndex] = {}

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """As many drafts as wanted, or none where nothing is found."""
        drafts = []
        for request, count in zip(requests, counts, strict=True):
            index = self._indices.get(request)
            if index is None:
                index = self._indices[request] = NgramIndex(self._shortest, self._longest)
            drafts.append(Draft(tuple(index.draft(request.token_ids, count))))
        return drafts

    def forget(self, request: Request) -> None:
        """The request ended; its tokens need no index any more."""
        self._indices.pop(request, None)


class NgramIndex:
    """Where the runs of one growing sequence stand.

    Args:
        shortest: tokens of the shortest run that is looked up, at least 1.
        longest: of the longest.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._latest: dict[tuple[int, ...], int] = {}
        self._previous = array("q")  # by the start of a run: the start of the same run before it, or -1

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow: none where nothing is found, else `count`.

        Args:
            tokens: the sequence; between calls it may only grow.
            count: of drafts.
        """
        if count < 1 or len(tokens) <= self._shortest:
            return []
        self._take_in(tokens)
        follows = self._find(tokens)
        if follows is None:
            return []
        draft = list(tokens[follows : follows + count])
        while len(draft) < count:
            draft.append(draft[len(draft) - (len(tokens) - follows)])
        return draft

    def _take_in(self, tokens: Sequence[int]) -> None:
        """Index the runs that end before the last token: the last ones are what will be looked up."""
        first, stop = len(self._previous), len(tokens) - self._shortest
        runs = zip(*(tokens[first + shift : stop + shift] for shift in range(self._shortest)), strict=True)
        for start, run in enumerate(runs, first):
            self._previous.append(self._latest.get(run, -1))
            self._latest[run] = start

    def _find(self, tokens: Sequence[int]) -> int | None:
        """The place after the best earlier occurrence of the last tokens."""
        begin = len(tokens) - self._shortest
        start = self._latest.get(tuple(tokens[begin:]), -1)
        best, best_extra, most = None, -1, self._longest - self._shortest
        while start >= 0:
            extra = 0  # tokens before the run that are equal too
            while extra < most and extra < start and tokens[start - 1 - extra] == tokens[begin - 1 - extra]:
                extra += 1
            if extra > best_extra:
                best, best_extra = start + self._shortest, extra
                if extra == most:
                    break
            start = self._previous[start]
        return best
