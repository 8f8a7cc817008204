"""Requests that wait, in the order in which the policy wants to admit them.

A request that was retracted comes before all that never ran (of its priority, where the policy is `priority`).
`lpm` sorts by what is in the prefix cache. So that nobody waits for ever there, a request that many later ones have
overtaken comes first; and only the head of a long queue is sorted, because every look-up costs.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator

from serving.scheduler.config import SchedulingPolicy
from serving.scheduler.request import TrackedRequest

__all__ = ["WaitingQueue"]

_MAX_SORTED = 128  # requests whose match is looked up, per step
_MAX_OVERTAKEN = 256  # arrivals after a request's own


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
        self._newest_admitted = -1

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[TrackedRequest]:
        return iter(self._requests)

    def push(self, request: TrackedRequest) -> None:
        """Add a new request, or one that was retracted."""
        insort(self._requests, request, key=self._key)

    def remove(self, request: TrackedRequest) -> None:
        """Take one out that ended while it waited."""
        self._requests.remove(request)

    def admit(self, request: TrackedRequest) -> None:
        """Take one out because it runs now."""
        self._requests.remove(request)
        self._newest_admitted = max(self._newest_admitted, request.arrival)

    def in_order(self) -> list[TrackedRequest]:
        """All of them, first to be admitted first; a copy."""
        if self._policy is not SchedulingPolicy.LPM:
            return list(self._requests)
        head, rest = self._requests[:_MAX_SORTED], self._requests[_MAX_SORTED:]
        return [*sorted(head, key=self._lpm_key), *rest]

    def _key(self, request: TrackedRequest) -> tuple[int, bool, int]:
        priority = request.priority if self._policy is SchedulingPolicy.PRIORITY else 0
        return priority, not request.retracted, request.arrival

    def _lpm_key(self, request: TrackedRequest) -> tuple[int, int]:
        if request.retracted or request.arrival + _MAX_OVERTAKEN < self._newest_admitted:
            return 0, request.arrival
        return 1, -self._num_cached(request)
