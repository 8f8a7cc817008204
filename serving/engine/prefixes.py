"""Which rank was sent which beginnings of prompts, so that a conversation finds its pages where they were computed.

A prompt is cut into pages, and a page's hash is of all tokens up to its end, so that one hash stands for a prefix. A
conversation's own pages attract it. What different prompts begin with, such as a system prompt, attracts none: it is
soon on all ranks, and would draw every new conversation to the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_PAGE = 16
"""Tokens. It need not be the engines' page size: the longest prefix is the longest in any unit."""
_MOST_PAGES = 2**16
"""Most pages known, a million tokens; the least recently used are forgotten."""
_PAGES_OF_A_PROMPT = 1024
"""Pages of a prompt that are looked at, so that a long one takes a millisecond."""


@dataclass(slots=True)
class _Page:
    """A prefix that ends with a page.

    Attributes:
        ranks: bit r is set if rank r was sent it.
        next: hash of the page that followed it first; None before any did.
        shared: whether different pages followed it, so that it is of several conversations.
    """

    ranks: int = 0
    next: int | None = None
    shared: bool = False


class Prefixes:
    """The beginnings of prompts that the ranks were sent. The scheduler's cache may have forgotten them earlier."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._pages: dict[int, _Page] = {}  # the least recently used first

    def pages(self, token_ids: Sequence[int]) -> list[int]:
        """The hashes of a prompt's whole pages."""
        last, hashes = 0, []
        if self._num_ranks > 1:
            for begin in range(0, min(len(token_ids) // _PAGE, _PAGES_OF_A_PROMPT) * _PAGE, _PAGE):
                last = hash((last, *token_ids[begin : begin + _PAGE]))
                hashes.append(last)
        return hashes

    def held(self, pages: Sequence[int]) -> list[int]:
        """By rank, how many pages of this prompt's own conversation it was sent, without a gap."""
        held, ranks, shared = [0] * self._num_ranks, -1, 0
        for count, page in enumerate(pages, 1):
            known = self._pages.get(page)
            ranks &= 0 if known is None else known.ranks
            if known is None or not ranks:
                break
            shared = count if known.shared else shared
            for rank in range(self._num_ranks):
                if ranks >> rank & 1:
                    held[rank] = count
        return [max(0, count - shared) for count in held]

    def add(self, pages: Sequence[int], rank: int) -> None:
        """The rank is sent a prompt with these pages."""
        following: int | None = None
        for page in reversed(pages):  # the first pages are the last to be forgotten: later ones are no use without
            known = self._pages.pop(page, None) or _Page()
            known.ranks |= 1 << rank
            known.shared |= None not in (known.next, following) and known.next != following
            known.next = known.next if following is None else following
            self._pages[page] = known
            following = page
        while len(self._pages) > _MOST_PAGES:
            del self._pages[next(iter(self._pages))]
