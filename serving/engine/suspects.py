"""Which request kills the engines: a search by halves, over failures. Pure logic: no clock, no process, no socket.

A request may kill an engine each time that it runs (its tokens reach a fault in a kernel, or its grammar raises). The
engines come back and the request goes on, so it kills them again; nobody sees which of the requests in the step it was.
A test of a group says it: run only that group. If the engine fails, a guilty request is among them. If each of them
makes `PROGRESS` tokens, or ends, none is. A failed test costs a restart, one that passes some steps: so a group that
must have a guilty one is cut without a test.

A strike is a failure inside a step that the request was in. `PROGRESS` tokens without one take its strikes away.

    state     event                                    next
    ALL RUN   failure outside a step, or by a signal   ALL RUN
    ALL RUN   failure inside                           ALL RUN; each request of the step gets a strike
                 alone in the step, SUSPECT strikes    ALL RUN; it is guilty
                 some have SUSPECT strikes             TEST their first half, then the second
    TEST G    failure outside a step, or by a signal   TEST G
    TEST G    failure inside
                 none of G was in the step             TEST G
                 G alone in the step, of one request   TEST the next group, or ALL RUN; it is guilty
                 G of one request, others in the step  TEST G: these were about to leave; the new engine has only G
                 else                                  TEST the first half of those of G that were in the step, then
                                                       the second, then the others of G, then the next groups
    TEST G    each of G made progress, ended or left   TEST the next group, or ALL RUN. If G is the first half of a
                                                       group that failed, the next one is the second: cut it

Of the requests in a failed step, those that had made `PROGRESS` tokens in the same test are not searched further: they
keep one strike.

How many failures it takes, of requests that kill at each step that they are in, where at most n are in a step: two
before the search, and max(1, ceil(log2 n)) in it for each guilty one. One more if it kills first in the midst of
another's search, and one more if an aborted request was still in its step when it ran alone: ceil(log2 n) + 4 at most.
Each innocent one waits for the search, runs in one test or more, and then freely. Two requests that kill only together
are cleared both, and kill again: the limit of restarts ends the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

PROGRESS = 8
"""Tokens that clear a request. Outputs of two steps may be on their way when an engine dies, of up to a few tokens each
with drafts: a request that kills at its next step cannot make as many."""
SUSPECT = 2
"""Strikes that make a request a suspect: one failure may be anything."""


@dataclass(frozen=True)
class Verdict:
    """What follows from a failure.

    Attributes:
        guilty: requests that have killed an engine while they ran alone; they must not run again.
        searching: the restart that follows is one of a search: it counts against the search's limit.
    """

    guilty: tuple[str, ...] = ()
    searching: bool = False


@dataclass
class _Group:
    """Requests that run in one test.

    Attributes:
        first_half: it has failed together with the next group of the queue.
    """

    requests: list[str]
    first_half: bool = False


class Suspects:
    """The strikes of requests, and the search. Its owner calls `failed` before it starts the engines again.

    Attributes:
        watching: whether `progressed` and `gone` have to be called; while nobody is suspected they need not be.
        allowed: the requests that may run; None if all may. It changes in `failed`, and where `progressed` or `gone`
            return True.
    """

    def __init__(self) -> None:
        self.watching = False
        self.allowed: frozenset[str] | None = None
        self._strikes: dict[str, int] = {}
        self._tokens: dict[str, int] = {}  # since its last strike, or since its test has begun
        self._queue: deque[_Group] = deque()

    def may_run(self, request_id: str) -> bool:
        """Whether a request may run now. If not, it waits, also if it is new."""
        return self.allowed is None or request_id in self.allowed

    # -- events -------------------------------------------------------------------------------------------------

    def failed(self, in_step: Collection[str], *, inside: bool, alive: Container[str]) -> Verdict:
        """An engine has failed, and all will be started again.

        Args:
            in_step: the requests in the steps that ran, of all ranks that step with the failed one.
            inside: whether it failed inside a step, by a fault of its own.
            alive: all requests that will go on. One that has ended or was aborted may still have been in a step: it
                may have been the guilty one, so no other was alone.
        """
        hit = [request_id for request_id in dict.fromkeys(in_step) if request_id in alive]
        if not inside or not hit:
            return Verdict()
        searching, alone = bool(self._queue), len(set(in_step)) == 1
        guilty = self._split_head(hit, alone) if searching else self._strike(hit, alone)
        self._begin_test()
        return Verdict(guilty, searching or bool(guilty) or bool(self._queue))

    def progressed(self, request_id: str, num_tokens: int) -> bool:
        """Count new tokens of a request. Returns whether other requests may run now."""
        tokens = self._tokens.get(request_id)
        if tokens is None:
            return False
        self._tokens[request_id] = tokens + num_tokens
        if tokens + num_tokens < PROGRESS:
            return False
        if not any(request_id in group.requests for group in self._queue):
            self._forget(request_id)
            return False
        return self._end_test()

    def gone(self, request_id: str) -> bool:
        """A request has ended, or its client has left. Returns whether other requests may run now."""
        self._forget(request_id)
        for group in self._queue:
            if request_id in group.requests:
                group.requests.remove(request_id)
                if self._end_test():
                    return True
                self.allowed = frozenset(self._queue[0].requests)
                return False
        return False

    # -- transitions --------------------------------------------------------------------------------------------

    def _strike(self, hit: Sequence[str], alone: bool) -> tuple[str, ...]:
        """All run: give strikes, begin a search; returns who is guilty."""
        self._give_strikes(hit)
        suspects = [request_id for request_id in hit if self._strikes[request_id] >= SUSPECT]
        if suspects and alone:
            self._forget(suspects[0])
            return tuple(suspects)
        self._queue.extend(_halves(suspects))
        return ()

    def _split_head(self, hit: Sequence[str], alone: bool) -> tuple[str, ...]:
        """The head of the queue has failed: cut it; returns who is guilty."""
        searched = {request_id for group in self._queue for request_id in group.requests}
        self._give_strikes([request_id for request_id in hit if request_id not in searched])
        head, in_step = self._queue[0].requests, set(hit)
        here = [request_id for request_id in head if request_id in in_step]
        if not here or (len(head) == 1 and not alone):
            return ()
        self._queue.popleft()
        if len(head) == 1:
            self._forget(head[0])
            return tuple(head)
        doubtful = [request_id for request_id in here if self._tokens[request_id] < PROGRESS]
        others = [request_id for request_id in head if request_id not in in_step]
        for request_id in set(here).difference(doubtful):
            self._strikes[request_id], self._tokens[request_id] = 1, 0
        self._queue.extendleft(reversed([*_halves(doubtful), _Group(others)]))
        return ()

    def _give_strikes(self, requests: Sequence[str]) -> None:
        for request_id in requests:
            self._strikes[request_id] = self._strikes.get(request_id, 0) + 1
            self._tokens[request_id] = 0

    def _end_test(self) -> bool:
        """End the test of the head, if it is over; returns whether it is."""
        head = self._queue[0]
        if any(self._tokens[request_id] < PROGRESS for request_id in head.requests):
            return False
        self._queue.popleft()
        for request_id in head.requests:
            self._forget(request_id)
        if head.first_half and self._queue and len(self._queue[0].requests) > 1:
            self._queue.extendleft(reversed(_halves(self._queue.popleft().requests)))
        self._begin_test()
        return True

    def _begin_test(self) -> None:
        """Let the first group that has requests run; without one, all."""
        while self._queue and not self._queue[0].requests:
            self._queue.popleft()
        self.allowed = None
        if self._queue:
            head = self._queue[0].requests
            self._tokens.update(dict.fromkeys(head, 0))
            self.allowed = frozenset(head)
        self.watching = bool(self._strikes)

    def _forget(self, request_id: str) -> None:
        self._strikes.pop(request_id, None)
        self._tokens.pop(request_id, None)
        self.watching = bool(self._strikes)


def _halves(requests: Sequence[str]) -> list[_Group]:
    """Two groups, or one of a single request, or none."""
    middle = (len(requests) + 1) // 2
    first, second = list(requests[:middle]), list(requests[middle:])
    return [_Group(half, first_half=half is first and bool(second)) for half in (first, second) if half]
