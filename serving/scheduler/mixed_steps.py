"""How many prompt tokens a mixed step takes: what prompts may cost the requests that decode beside them.

A step is mixed for everybody who waits for it: where ranks step together, one rank's prompt holds up the others'
decodes. So the vote of every step tells how many of each rank's tokens are of prompts, and how long the step before
took; what is decided here follows from these alone, and is the same on all ranks, whatever their clocks say.

    off      as many as the step has room for
    N        at most N where somebody decodes
    auto     as many as keep a mixed step at about twice the time of decodes alone

`auto` keeps the times of the last few steps of decodes alone, by the number of these (powers of two), and of the last
mixed steps. It stays at one page until it has seen some of either, and goes up to twice what it has seen at most. Where
prompts come without end, now and then a step is left to the decodes, to see what they take alone: soon where few have
been seen, or where what is known cannot be right. A slow one among them counts for nothing; a mixed step that took far
too long makes the next one small at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Literal, Protocol, TypeAlias

from ubatch import Decision

__all__ = ["MeasuredLimit", "MixedSteps", "PrefillLimit"]

PrefillLimit: TypeAlias = int | Literal["auto"] | None
"""Most prompt tokens of a mixed step; None does not limit them."""

_STRETCH = 2.0  # time of a mixed step over that of decodes alone; the slowest hundredth must stay below three
_TOO_LONG = 3.0
_ALONE_KEPT = 5  # steps of decodes alone, per number of decodes; the second fastest counts
_ENOUGH = 3  # of them
_MIXED_KEPT = 8  # mixed steps; a quarter of them may have cost more than what is reckoned with
_LOOK_EVERY = 64  # mixed steps without one of decodes alone
_LOOK_SOON = 8  # likewise, where those that are known are few, or contradicted
_CONTRADICTED = 2.0  # times as slow or as fast as what is known
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
        self._mixed: deque[tuple[int, int, float]] = deque(maxlen=_MIXED_KEPT)  # size, prompt tokens, seconds
        self._tokens = block_size
        self._size = 0  # of the last mixed step
        self._doubtful = False
        self._look_after = 0  # mixed steps
        self._since_alone = 0
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
        if prefills:
            self._since_alone += 1
            if seconds > 0:
                self._see_mixed(size, prefills, seconds)
        else:
            self._since_alone = self._looked = 0
            if seconds > 0:
                self._see_alone(size, seconds)
            self._plan_look()

    def tokens(self) -> int:
        """For the next mixed step: a page or more, or 0 to see what decodes take alone."""
        if self._since_alone >= self._look_after:
            self._looked += 1
            if self._looked <= _LOOK_STEPS:
                return 0
            self._since_alone = self._looked = 0
            self._look_after = _LOOK_EVERY  # there are none: another rank's prompts, say
        return self._tokens

    def _see_alone(self, size: int, seconds: float) -> None:
        known = self._alone.setdefault(size, deque(maxlen=_ALONE_KEPT))
        usual = _usual(known) if len(known) >= _ENOUGH else seconds
        self._doubtful = not usual / _CONTRADICTED < seconds < usual * _CONTRADICTED
        known.append(seconds)
        self._size = size

    def _see_mixed(self, size: int, prefills: int, seconds: float) -> None:
        self._mixed.append((size, prefills, seconds))
        self._size = size
        alone = self._alone_at(size)
        if alone is None:
            self._tokens = self._block_size
            return
        self._tokens = self._fitting((_STRETCH - 1) * alone)
        if seconds > _TOO_LONG * alone:
            self._tokens = min(self._tokens, self._pages(int(prefills * alone / (seconds - alone))))
        if seconds < alone and not self._doubtful:
            self._doubtful = True
            self._plan_look()

    def _plan_look(self) -> None:
        few = len(self._alone.get(self._size, ())) < _ENOUGH
        self._look_after = _LOOK_SOON if few or self._doubtful else _LOOK_EVERY

    def _alone_at(self, size: int) -> float | None:
        """What decodes take alone, of the nearest size of which enough is known."""
        known = [each for each, times in self._alone.items() if len(times) >= _ENOUGH]
        if not known:
            return None
        return _usual(self._alone[min(known, key=lambda each: (abs(each - size), each))])

    def _fitting(self, seconds: float) -> int:
        most = min(self._most, 2 * max(tokens for _, tokens, _ in self._mixed))
        costs = sorted(max(0.0, took - (self._alone_at(size) or took)) / tokens for size, tokens, took in self._mixed)
        cost = costs[len(costs) * 3 // 4]
        return self._pages(most if cost * most <= seconds else int(seconds / cost))

    def _pages(self, tokens: int) -> int:
        """Up to a whole page: what a mixed step costs whatever it takes makes few tokens look dearer than they are."""
        return min(self._most, max(1, -(-tokens // self._block_size)) * self._block_size)


def _usual(times: Collection[float]) -> float:
    return sorted(times)[min(1, len(times) - 1)]


class MixedSteps:
    """The limit in force, told of every step in the order of the steps.

    Args:
        limit: most prompt tokens.
        block_size: tokens per page.
        most: tokens of a step.
        own_ranks: which ranks of a vote plan these same steps: this one, and with tensor parallelism its replica's.
    """

    def __init__(self, limit: PrefillLimit, block_size: int, most: int, own_ranks: range = range(1)) -> None:
        self._limit: _Limit | None = None
        if limit is not None:
            self._limit = MeasuredLimit(block_size, most) if limit == "auto" else _Fixed(limit)
        self._own_ranks = own_ranks
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
        if last is None:
            return False
        counts = enumerate(zip(last.tokens, last.prefill_tokens, strict=False))
        return any(sum(row) > prefills for rank, (row, prefills) in counts if rank not in self._own_ranks)
