"""Whether a failure is the fault of the rank that failed, inside a step, and which requests were in that step. No I/O.

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
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from serving.engine.options import EngineOptions
from serving.engine.restarts import RestartReason
from serving.engine.wire.messages import Failed, RankFound

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
