"""The queue of waiting requests, in the policy's order of admission.

Groups take turns (a `group` is one HTTP body): each turn admits one request of every waiting group, in order within the
group. A new request gets the turn after its group's newest one, but at least the next turn. So the first request of a
group waits for at most one request of every earlier group, however many these have, and later groups do not delay it.
With policy `priority`, each priority counts its own turns.

A retracted request goes before all requests (of its priority) that never ran. `lpm` sorts by the cached prefix, then by
turn. Two limits there: a request whose turn is long past goes first, so that none waits forever; and only the head of a
long queue is sorted, because each look-up costs time.

Every group has one request per turn. If bodies of one request arrive as fast as requests are served, all of those
waiting are admitted between two requests of a large body, which then progresses slowly. That is intended.

Source: start-time fair queueing (Goyal, Vin, Cheng 1996) with requests as units.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from serving.scheduler.config import SchedulingPolicy
from serving.scheduler.request import TrackedRequest

_MAX_SORTED = 128  # `lpm`: requests sorted by their cached prefix, per step
_MAX_OVERTAKEN = 256  # `lpm`: a request whose turn is further back than this goes first


@dataclass
class _Turns:
    """Turns of one priority.

    Attributes:
        current: the latest turn of an admitted request.
        newest: waiting group -> the turn of its newest request.
        waiting: group -> its requests that have not run yet.
    """

    current: int = 0
    newest: dict[str, int] = field(default_factory=dict)
    waiting: Counter[str] = field(default_factory=Counter)

    def next_for(self, group: str) -> int:
        """The turn of a new request of a group."""
        turn = max(self.current, self.newest.get(group, 0)) + 1
        self.newest[group] = turn
        self.waiting[group] += 1
        return turn

    def leave(self, group: str) -> None:
        """A request of a group has left the queue."""
        self.waiting[group] -= 1
        if not self.waiting[group]:
            del self.waiting[group], self.newest[group]


class WaitingQueue:
    """The queue; the module's text describes its order.

    Args:
        policy: the order of admission.
        num_cached: a function: how much of a request the prefix cache has now.
    """

    def __init__(self, policy: SchedulingPolicy, num_cached: Callable[[TrackedRequest], int]) -> None:
        self._policy = policy
        self._num_cached = num_cached
        self._requests: list[TrackedRequest] = []
        self._turns: dict[int, _Turns] = {}  # by priority

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[TrackedRequest]:
        return iter(self._requests)

    def push(self, request: TrackedRequest) -> None:
        """Add a new request, or a retracted one, which keeps its turn."""
        if not request.retracted:
            request.turn = self._turns.setdefault(self._priority(request), _Turns()).next_for(request.group)
        insort(self._requests, request, key=self._key)

    def remove(self, request: TrackedRequest) -> None:
        """Remove a request that ended while it waited."""
        del self._requests[bisect_left(self._requests, self._key(request), key=self._key)]
        if not request.retracted:
            priority = self._priority(request)
            self._turns[priority].leave(request.group)
            if not self._turns[priority].waiting:
                del self._turns[priority]

    def admit(self, request: TrackedRequest) -> None:
        """Remove a request because it runs now."""
        if not request.retracted:
            turns = self._turns[self._priority(request)]
            turns.current = max(turns.current, request.turn)
        self.remove(request)

    def in_order(self) -> Iterator[TrackedRequest]:
        """Iterate over all requests in the order of admission. The current one may be removed during the iteration."""
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
