"""Limits the prompt tokens of a mixed step (prompts and decodes together), which slow down the decodes.

Where ranks step together, one rank's prompt delays the decodes of all ranks. So the vote of every step carries the
number of prompt tokens of each rank, and the time of the step before. The limit depends on these values only, so it is
the same on all ranks, whatever their clocks say.

    off      no limit: prompts fill the step
    N        at most N prompt tokens in a step with decodes
    auto     the limit that keeps a mixed step at about twice the time of a step of decodes alone

`auto` keeps the times of the last few decode-only steps, by their number of decodes (powers of two), and of the last
mixed steps. The limit starts at one page, until both kinds of steps were measured, and is at most twice the largest
number measured. If prompts never stop, `auto` now and then leaves prompts out of a step to measure the decodes alone:
soon if it has few measurements or they contradict each other, otherwise rarely. One slow decode-only step does not
count; a mixed step that took far too long lowers the limit at once.
"""

from collections import deque
from collections.abc import Collection
from typing import Literal, TypeAlias

from ubatch import Decision

PrefillLimit: TypeAlias = int | Literal["auto"] | None
"""Most prompt tokens of a mixed step; None does not limit them."""

_STRETCH = 2.0  # wanted time of a mixed step over that of decodes alone; the 99th percentile must stay below 3
_TOO_LONG = 3.0  # a mixed step with more than this ratio lowers the limit at once
_ALONE_KEPT = 5  # times kept of decode-only steps, per number of decodes; the second fastest counts
_ENOUGH = 3  # times needed before they are used
_MIXED_KEPT = 8  # mixed steps kept; the 75th percentile of their costs per token is used
_LOOK_EVERY = 64  # mixed steps until the next decode-only step is measured
_LOOK_SOON = 8  # the same, if there are fewer than `_ENOUGH` times or they are contradicted
_CONTRADICTED = 2.0  # a time is contradicted by one that is this many times longer or shorter
_LOOK_STEPS = 4  # most steps in a row without prompts; the overlapped loop sees a time a step or two later


class MeasuredLimit:
    """The limit `auto`, computed from the measured times of steps.

    Args:
        block_size: tokens per page; the limit is a multiple of it, unless `most` is less.
        most: tokens of a step.
    """

    def __init__(self, block_size: int, most: int) -> None:
        self._block_size = block_size
        self._most = most
        self._alone: dict[int, deque[float]] = {}  # bit length of the number of decodes -> seconds
        self._mixed: deque[tuple[int, int, float]] = deque(maxlen=_MIXED_KEPT)  # size, prompt tokens, seconds
        self._tokens = block_size
        self._size = 0  # of the last mixed step
        self._doubtful = False
        self._look_after = 0  # mixed steps until prompts are left out
        self._since_alone = 0
        self._looked = 0

    def see(self, decodes: int, prefills: int, seconds: float) -> None:
        """Record a step that has run.

        Args:
            decodes: its decode tokens, on the rank with the most.
            prefills: its prompt tokens, on the rank with the most.
            seconds: its duration; 0 if unknown.
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
        """The limit for the next mixed step: a page or more, or 0 to measure a step of decodes alone."""
        if self._since_alone >= self._look_after:
            self._looked += 1
            if self._looked <= _LOOK_STEPS:
                return 0
            self._since_alone = self._looked = 0
            self._look_after = _LOOK_EVERY  # no decode-only step was seen: another rank may run prompts
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
        """Seconds of a decode-only step, for the nearest size with enough times."""
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
        """Round up to whole pages: the fixed cost of a mixed step makes small numbers of tokens look too expensive."""
        return min(self._most, max(1, -(-tokens // self._block_size)) * self._block_size)


def _usual(times: Collection[float]) -> float:
    return sorted(times)[min(1, len(times) - 1)]


class MixedSteps:
    """Applies the limit; `launched` and `processed` must be called for every step, in order.

    Args:
        own_ranks: the ranks of a vote that plan the same steps: this one, and its tensor-parallel group's.
    """

    def __init__(self, limit: PrefillLimit, block_size: int, most: int, own_ranks: range = range(1)) -> None:
        self._limit = MeasuredLimit(block_size, most) if limit == "auto" else limit
        self._own_ranks = own_ranks
        self._last: Decision | None = None
        self._before: deque[Decision | None] = deque()  # per step in flight: the last known decision at its launch

    def room(self, room: int, num_decodes: int) -> int:
        """How many of `room` tokens prompts may use, with `num_decodes` decodes here and those of other ranks."""
        if self._limit is None or not (num_decodes or self._others_decode):
            return room
        return min(room, self._limit if isinstance(self._limit, int) else self._limit.tokens())

    def launched(self) -> None:
        """A step was launched; its vote carries the time of the last known step."""
        if self._limit is not None:
            self._before.append(self._last)

    def processed(self, decision: Decision) -> None:
        """The oldest step in flight has ended with this decision."""
        if self._limit is None:
            return
        before = self._before.popleft()
        if isinstance(self._limit, MeasuredLimit) and before is not None and before.prefill_tokens:
            decodes = max(map(int.__sub__, map(sum, before.tokens), before.prefill_tokens))
            self._limit.see(decodes, max(before.prefill_tokens), decision.period_us / 1e6)
        self._last = decision

    @property
    def _others_decode(self) -> bool:
        """Whether another rank decoded in the last known step. Own decodes are left out: the caller counts them."""
        last = self._last
        if last is None:
            return False
        counts = enumerate(zip(last.tokens, last.prefill_tokens, strict=False))
        return any(sum(row) > prefills for rank, (row, prefills) in counts if rank not in self._own_ranks)
