"""Requests that wait, in the order in which the policy wants to admit them.

Bodies take turns: requests of one `group` wait in their order, and of every group one is admitted before the next of
any other is. Each request gets the number of its turn when it comes: one after its group's newest, but not before the
turn that is next. So a request waits for one of every group that was there before it, however many these have, and a
later group cannot hold it up for longer. Turns are counted for each priority, where the policy is `priority`.

A request that was retracted comes before all that never ran (of its priority). `lpm` sorts by what is in the prefix
cache, then by turns. So that nobody waits for ever there, a request whose turn was long ago comes first; and only the
head of a long queue is sorted, because every look-up costs.

A turn is a body's, whatever it has: where bodies of one request come as fast as requests are served, all of those that
wait come between one request of a large body and the next, so that the large one hardly gets on until they are fewer.
That is intended.

Source: start-time fair queueing (Goyal, Vin, Cheng 1996) with requests as units.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from serving.scheduler.config import SchedulingPolicy
from serving.scheduler.request import TrackedRequest

__all__ = ["WaitingQueue"]

_MAX_SORTED = 128  # requests whose match is looked up, per step
_MAX_OVERTAKEN = 256  # turns after a request's own


@dataclass
class _Turns:
    """Turns of one priority.

    Attributes:
        current: the latest that was admitted.
        newest: group -> the turn of its newest request, of groups that wait.
        waiting: group -> requests of it that have not run yet.
    """

    current: int = 0
    newest: dict[str, int] = field(default_factory=dict)
    waiting: Counter[str] = field(default_factory=Counter)

    def next_for(self, group: str) -> int:
        """The turn of one more request of a group."""
        turn = max(self.current, self.newest.get(group, 0)) + 1
        self.newest[group] = turn
        self.waiting[group] += 1
        return turn

    def leave(self, group: str) -> None:
        """A request of a group waits no more."""
        self.waiting[group] -= 1
        if not self.waiting[group]:
            del self.waiting[group], self.newest[group]


class WaitingQueue:
    """See the module.

    Args:
        policy: who comes first.
        num_cached: tokens of a request that the prefix cache has now.
    """

    def __init__(self, policy: SchedulingPolicy, num_cached: Callable[[TrackedRequest], int]) -> None:
        self._policy = policy
        self._num_cached = num_cached
        self._requests: list[TrackedRequest] = []
        self._turns: dict[int, _Turns] = {}  # of priorities that wait

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[TrackedRequest]:
        return iter(self._requests)

    def push(self, request: TrackedRequest) -> None:
        """Add a new request, or one that was retracted, which keeps its turn."""
        if not request.retracted:
            request.turn = self._turns.setdefault(self._priority(request), _Turns()).next_for(request.group)
        insort(self._requests, request, key=self._key)

    def remove(self, request: TrackedRequest) -> None:
        """Take one out that ended while it waited."""
        del self._requests[bisect_left(self._requests, self._key(request), key=self._key)]
        if not request.retracted:
            priority = self._priority(request)
            self._turns[priority].leave(request.group)
            if not self._turns[priority].waiting:
                del self._turns[priority]

    def admit(self, request: TrackedRequest) -> None:
        """Take one out because it runs now."""
        if not request.retracted:
            turns = self._turns[self._priority(request)]
            turns.current = max(turns.current, request.turn)
        self.remove(request)

    def in_order(self) -> Iterator[TrackedRequest]:
        """All of them, first to be admitted first. Each may be taken out before the next is asked for."""
        if self._policy is not SchedulingPolicy.LPM:
            yield from self._from(0)
            return
        head = list(islice(self._requests, _MAX_SORTED))
        rest = len(self._requests) - len(head)
        yield from sorted(head, key=self._lpm_key)
        yield from self._from(len(self._requests) - rest)

    def _from(self, place: int) -> Iterator[TrackedRequest]:
        while place < len(self._requests):
            request = self._requests[place]
            yield request
            if place < len(self._requests) and self._requests[place] is request:
                place += 1

    def _priority(self, request: TrackedRequest) -> int:
        return request.priority if self._policy is SchedulingPolicy.PRIORITY else 0

    def _key(self, request: TrackedRequest) -> tuple[int, bool, int, int]:
        return self._priority(request), not request.retracted, request.turn, request.arrival

    def _lpm_key(self, request: TrackedRequest) -> tuple[int, int]:
        if request.retracted:
            return 0, request.arrival
        if request.turn + _MAX_OVERTAKEN < self._turns[0].current:
            return 1, request.turn
        return 2, -self._num_cached(request)
