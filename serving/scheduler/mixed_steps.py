"""How many prompt tokens a mixed step takes: what prompts may cost the requests that decode beside them.

A step is mixed for everybody who waits for it: where ranks step together, one rank's prompt holds up the others'
decodes. So the vote of every step tells how many of each rank's tokens are of prompts, and how long the step before
took; what is decided here follows from these alone, and is the same on all ranks, whatever their clocks say.

    off      as many as the step has room for
    N        at most N where somebody decodes
    auto     as many as keep a mixed step at about twice the time of decodes alone

`auto` keeps the time of steps of decodes alone, by the number of these (powers of two), and what a prompt token has
added to the last mixed steps. It begins with one page, and goes up to twice what it has seen at most. Where prompts
come without end, now and then a step is left to the decodes, to see what they take alone.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Literal, Protocol, TypeAlias

from ubatch import Decision

__all__ = ["MeasuredLimit", "MixedSteps", "PrefillLimit"]

PrefillLimit: TypeAlias = int | Literal["auto"] | None
"""Most prompt tokens of a mixed step; None does not limit them."""

_STRETCH = 2.0  # time of a mixed step over that of decodes alone; the slowest hundredth must stay below three
_ALONE_KEPT = 31  # steps of decodes alone, per number of decodes
_MIXED_KEPT = 8  # mixed steps; a quarter of them may have cost more than what is reckoned with
_LOOK_EVERY = 64  # mixed steps without one of decodes alone
_LOOK_STEPS = 4  # at most; in the overlapped loop it takes a step or two until one is seen


class _Limit(Protocol):
    def see(self, decodes: int, prefills: int, seconds: float) -> None: ...
    def tokens(self) -> int: ...


class _Fixed:
    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def see(self, decodes: int, prefills: int, seconds: float) -> None:
        pass

    def tokens(self) -> int:
        return self._tokens


class MeasuredLimit:
    """The limit `auto`, from the times of steps.

    Args:
        block_size: tokens per page; the limit is a multiple of it, unless `most` is less.
        most: tokens of a step.
    """

    def __init__(self, block_size: int, most: int) -> None:
        self._block_size = block_size
        self._most = most
        self._alone: dict[int, deque[float]] = {}  # by the bits of the number of decodes
        self._mixed: deque[tuple[int, float]] = deque(maxlen=_MIXED_KEPT)  # prompt tokens, seconds that one added
        self._tokens = block_size
        self._since_alone = _LOOK_EVERY
        self._looked = 0

    def see(self, decodes: int, prefills: int, seconds: float) -> None:
        """A step has run.

        Args:
            decodes: tokens of it that are not of prompts, of the rank that has most.
            prefills: tokens of prompts, likewise.
            seconds: that it took; 0 if that is not known.
        """
        if not decodes:
            return
        size = decodes.bit_length()
        if not prefills:
            self._since_alone = self._looked = 0
            if seconds > 0:
                self._alone.setdefault(size, deque(maxlen=_ALONE_KEPT)).append(seconds)
            return
        self._since_alone += 1
        if seconds > 0 and self._alone:
            nearest = min(self._alone, key=lambda known: (abs(known - size), known))
            alone = statistics.median(self._alone[nearest])
            self._mixed.append((prefills, max(0.0, seconds - alone) / prefills))
            self._tokens = self._fitting((_STRETCH - 1) * alone)

    def tokens(self) -> int:
        """For the next mixed step: a page or more, or 0 to see what decodes take alone."""
        if self._since_alone >= _LOOK_EVERY:
            self._looked += 1
            if self._looked <= _LOOK_STEPS:
                return 0
            self._since_alone = self._looked = 0
        return self._tokens

    def _fitting(self, seconds: float) -> int:
        most = min(self._most, 2 * max(tokens for tokens, _ in self._mixed))
        costs = sorted(cost for _, cost in self._mixed)
        cost = costs[len(costs) * 3 // 4]
        tokens = most if cost * most <= seconds else int(seconds / cost)
        # Up to a whole page: what a mixed step costs whatever it takes makes few tokens look dearer than they are.
        return min(self._most, max(1, -(-tokens // self._block_size)) * self._block_size)


class MixedSteps:
    """The limit in force, told of every step in the order of the steps.

    Args:
        limit: most prompt tokens.
        block_size: tokens per page.
        most: tokens of a step.
    """

    def __init__(self, limit: PrefillLimit, block_size: int, most: int) -> None:
        self._limit: _Limit | None = None
        if limit is not None:
            self._limit = MeasuredLimit(block_size, most) if limit == "auto" else _Fixed(limit)
        self._last: Decision | None = None
        self._before: deque[Decision | None] = deque()  # the last that was known when each step in flight was launched

    def room(self, room: int, num_decodes: int) -> int:
        """How many of `room` tokens prompts may take beside `num_decodes` decodes here, and those of other ranks."""
        if self._limit is None or not (num_decodes or self._others_decode):
            return room
        return min(room, self._limit.tokens())

    def launched(self) -> None:
        """A step was launched: its vote tells how long the last known one took."""
        if self._limit is not None:
            self._before.append(self._last)

    def processed(self, decision: Decision) -> None:
        """The oldest step that was launched has ended."""
        if self._limit is None:
            return
        before = self._before.popleft()
        if before is not None and before.prefill_tokens:
            decodes = max(map(int.__sub__, map(sum, before.tokens), before.prefill_tokens))
            self._limit.see(decodes, max(before.prefill_tokens), decision.period_us / 1e6)
        self._last = decision

    @property
    def _others_decode(self) -> bool:
        """Whether another rank did, in the last step that is known. One's own decodes are known better."""
        last = self._last
        if last is None or len(last.prefill_tokens) < 2:
            return False
        return any(sum(row) > prefills for row, prefills in zip(last.tokens, last.prefill_tokens, strict=True))
