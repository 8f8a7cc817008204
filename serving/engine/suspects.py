"""Which request kills the engines: whose fault a failure is, and a search by halves, over failures. Pure logic: no
clock, no process, no socket.

`blame` says whether a failure is the fault of the rank that failed, inside a step, and which requests were in it:

    how the rank failed                                    its own fault
    ended by SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL ...  yes: native code did something wrong
    ended by another signal                                no: somebody has sent it, or the kernel, short of memory
    ended without a report                                 yes
    raised an error                                        yes; no, if it only noticed a failed peer
    silent, and runs, sleeps or waits                      yes: it hangs
    silent, and is stopped (or we cannot know)             no: somebody has stopped it
    on a node that cannot be reached, or was ended         no

While a rank is stopped, those that step with it time out: no error of theirs counts then. Ranks that share experts step
together, and each one's tokens visit the experts of all: the requests of all of them were in the step.

A request may kill an engine each time that it runs (its tokens reach a fault in a kernel, or its grammar raises). The
engines come back and the request goes on, so it kills them again; nobody sees which of the requests in the step it was.
A test of a group says it: run only that group. If the engine fails, a guilty request is among them. If each of them
makes `PROGRESS` tokens, or ends, none is. A failed test costs a restart, one that passes some steps: so a group that
must have a guilty one is cut without a test.

A strike is a failure inside a step that the request was in. `PROGRESS` tokens without one take its strikes away.

    state     event                                    next
    ALL RUN   failure outside a step, or by a signal   ALL RUN
    ALL RUN   failure inside                           ALL RUN; each request of the step gets a strike
                 some have SUSPECT strikes             TEST their first half, then the second; a single one alone
    TEST G    failure outside a step, or by a signal   TEST G
    TEST G    failure inside
                 none of G was in the step             TEST G
                 G alone in the step, of one request   TEST the next group, or ALL RUN; it is guilty, if not in doubt
                 G of one request, others in the step  TEST G: they passed an earlier test; the new engine has only G
                 else                                  TEST the first half of those of G that were in the step, then
                                                       the second, then the others of G, then the next groups
    TEST G    each of G made progress, ended or left   TEST the next group, or ALL RUN. If G is the first half of a
                                                       group that failed, the next one is the second: cut it

Engines that fail whatever runs look the same, and every request would be guilty. Hence *doubt*: it begins with a guilty
request in whose search no request has made progress or ended well, and it ends once one does. In doubt

    - a request that kills alone is not guilty, but tested again after all others;
    - what is left of a group that failed is also tested after all others;
    - one request that is no suspect, if there is one, is tested first;
    - a failure counts as an ordinary one, so engines that always fail reach that limit.

Of the requests in a failed step, those that had made `PROGRESS` tokens in the same test are not searched further: they
keep one strike.

How many failures it takes, of requests that kill at each step that they are in, where at most n are in a step (all that
the scheduler has, if they kill there): two
before the search, and max(1, ceil(log2 n)) in it for each guilty one. One more if it kills first in the midst of
another's search, and one more if others were still in the step when it was to run alone: ceil(log2 n) + 4 at most, as
long as there is no doubt; of these the first is an ordinary one. In doubt groups fail until one without a guilty one is
tested; without any, until the limit ends the run. Each innocent one waits for the search, runs in one test or more, and
then freely. Two requests that kill only together are cleared both, and kill again: the limit of restarts ends the run.
"""

import signal
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from serving.engine.options import EngineOptions
from serving.engine.restarts import RestartReason
from serving.engine.wire.messages import Failed, RankFound

PROGRESS = 8
"""Tokens that clear a request. Outputs of two steps may be on their way when an engine dies, of up to a few tokens each
with drafts: a request that kills at its next step cannot make as many."""
SUSPECT = 2
"""Strikes that make a request a suspect: one failure may be anything."""
_OWN_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP}
)
_STOPPED, _LIVING = frozenset("Tt"), frozenset("RSD")
"""States of a process, as letters of `/proc`."""


@dataclass(frozen=True)
class Blame:
    """What is known of a failure.

    Attributes:
        inside: the rank has failed inside a step, by a fault of its own.
        requests: those in the step, of all ranks that step together; empty if the failure is nobody's fault.
    """

    inside: bool = False
    requests: tuple[str, ...] = ()


def blame(options: EngineOptions, failed: Failed, found: Mapping[int, RankFound]) -> Blame:
    """Who is to blame for a failure.

    Args:
        failed: the report that names the cause (`Liveness`).
        found: what ranks were doing, as far as known (`LocalEngines.found`, `NodeFound`).
    """
    together = [found.get(rank, RankFound()) for rank in options.together(failed.rank)]
    own = found.get(failed.rank, RankFound())
    steps = [own.in_step, failed.in_step]
    stopped = any(each.state in _STOPPED for each in together)
    if stopped or not _is_own_fault(failed, own.state) or not any(step.inside for step in steps):
        return Blame()
    steps += [each.in_step for each in together]
    return Blame(True, tuple(dict.fromkeys(name for step in steps for name in step.requests)))


def _is_own_fault(failed: Failed, state: str) -> bool:
    match failed.reason:
        case RestartReason.KILLED:
            return failed.signal in _OWN_SIGNALS
        case RestartReason.EXITED:
            return True
        case RestartReason.FAILED:
            return not failed.echo
        case RestartReason.HUNG:
            return state in _LIVING
        case RestartReason.UNREACHABLE:
            return False


@dataclass(frozen=True)
class Verdict:
    """What follows from a failure.

    Attributes:
        guilty: requests that have killed an engine while they ran alone; they must not run again.
        searching: the restart that follows is one of a search without doubt: it counts against the search's limit.
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
        allowed: the requests that may run; None if all may. It changes in `failed`, and where `progressed` or `gone`
            return True.
    """

    def __init__(self) -> None:
        self.allowed: frozenset[str] | None = None
        self._strikes: dict[str, int] = {}
        self._tokens: dict[str, int] = {}  # since its last strike, or since its test has begun
        self._queue: deque[_Group] = deque()
        self._proved = False  # a request has made progress or ended well since the search began
        self._doubted = False  # one was called guilty without that; not both are true

    @property
    def watching(self) -> bool:
        """Whether `progressed` and `gone` have to be called; while nobody is suspected they need not be."""
        return bool(self._tokens) or self._doubted

    def may_run(self, request_id: str) -> bool:
        """Whether a request may run now. If not, it waits, also if it is new."""
        return self.allowed is None or request_id in self.allowed

    # -- events -------------------------------------------------------------------------------------------------

    def failed(self, in_step: Collection[str], *, inside: bool, alive: Collection[str]) -> Verdict:
        """An engine has failed, and all will be started again.

        Args:
            in_step: the requests in the steps that ran, of all ranks that step with the failed one.
            inside: whether it failed inside a step, by a fault of its own.
            alive: all requests that will go on, the oldest first. One that has ended or was aborted may still have been
                in a step: it may have been the guilty one, so no other was alone.
        """
        hit = [request_id for request_id in dict.fromkeys(in_step) if request_id in alive]
        if not inside or not hit:
            return Verdict()
        searching, doubted = bool(self._queue), self._doubted
        guilty: tuple[str, ...] = ()
        if searching:
            guilty = self._split_head(hit, alone=len(set(in_step)) == 1)
        else:
            self._begin_search(hit)
        if self._doubted and self._queue:
            self._test_another(request_id for request_id in alive if request_id not in guilty)
        self._begin_test()
        return Verdict(guilty, (searching or bool(self._queue)) and not doubted)

    def progressed(self, request_id: str, num_tokens: int) -> bool:
        """Count new tokens of a request. Returns whether other requests may run now."""
        tokens = self._tokens.get(request_id, 0 if self._doubted else None)
        if tokens is None:
            return False
        self._tokens[request_id] = tokens + num_tokens
        if tokens + num_tokens < PROGRESS:
            return False
        self._engines_work()
        if not any(request_id in group.requests for group in self._queue):
            self._forget(request_id)
            return False
        return self._end_test()

    def gone(self, request_id: str, *, well: bool = False) -> bool:
        """A request has ended, or its client has left. Returns whether other requests may run now.

        Args:
            well: it has ended with a whole output.
        """
        if well:
            self._engines_work()
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

    def _begin_search(self, hit: Sequence[str]) -> None:
        """All run: give strikes, and begin a search if some have many."""
        self._give_strikes(hit)
        suspects = [request_id for request_id in hit if self._strikes[request_id] >= SUSPECT]
        self._queue.extend(_halves(suspects))
        self._proved = False

    def _split_head(self, hit: Sequence[str], alone: bool) -> tuple[str, ...]:
        """The head of the queue has failed: cut it; returns who is guilty."""
        searched = self._searched()
        self._give_strikes([request_id for request_id in hit if request_id not in searched])
        head, in_step = self._queue[0].requests, set(hit)
        here = [request_id for request_id in head if request_id in in_step]
        if not here or (len(head) == 1 and not alone):
            return ()
        self._queue.popleft()
        if len(head) == 1 and self._doubted:
            self._queue.append(_Group(head))
            return ()
        if len(head) == 1:
            self._forget(head[0])
            self._doubted = not self._proved
            return tuple(head)
        doubtful = [request_id for request_id in here if self._tokens[request_id] < PROGRESS]
        others = [request_id for request_id in head if request_id not in in_step]
        for request_id in set(here).difference(doubtful):
            self._strikes[request_id], self._tokens[request_id] = 1, 0
        parts = [*_halves(doubtful), _Group(others)]
        if self._doubted:
            self._queue.extend(parts)
        else:
            self._queue.extendleft(reversed(parts))
        return ()

    def _test_another(self, requests: Iterable[str]) -> None:
        """Test one that is not searched, if there is one: do engines work at all?"""
        searched = self._searched()
        another = next((request_id for request_id in requests if request_id not in searched), None)
        if another is not None:
            self._queue.appendleft(_Group([another]))

    def _engines_work(self) -> None:
        self._proved, self._doubted = True, False

    def _searched(self) -> set[str]:
        return {request_id for group in self._queue for request_id in group.requests}

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

    def _forget(self, request_id: str) -> None:
        self._strikes.pop(request_id, None)
        self._tokens.pop(request_id, None)


def _halves(requests: Sequence[str]) -> list[_Group]:
    """Two groups, or one of a single request, or none."""
    middle = (len(requests) + 1) // 2
    first, second = list(requests[:middle]), list(requests[middle:])
    return [_Group(half, first_half=half is first and bool(second)) for half in (first, second) if half]
