"""Work for the gaps of a step: the times in which it waits for a transfer, and no lane computes.

    with in_gaps(work):
        step()                     # its lanes' gaps, too: the caller's context travels into lanes

`work()` is called where a wait begins whose transfer has not arrived, in the thread that waits. It should be short, as
it may end after the transfer's arrival. It runs outside of the lane: what it launches is none of the lane's transfers.
An error in it is an error of the wait. Its own waits are no gaps. A transfer that only the device waits for gives none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context

from ubatch.lanes.context import leave_lane
from ubatch.process.interrupts import changing
from ubatch.ranks.transfer_times import stop_recording

_work: ContextVar[Callable[[], object] | None] = ContextVar("ubatch_work_in_gaps", default=None)


def in_gaps(work: Callable[[], object]) -> AbstractContextManager[object]:
    """Do this work in the gaps of the `with` block."""
    return changing(_work, work)


gap_work = _work.get
"""Returns the work of gaps, or None."""


def fill_gap(work: Callable[[], object]) -> None:
    """Do the work in the gap that begins."""
    copy_context().run(_apart, work)


def _apart(work: Callable[[], object]) -> None:
    _work.set(None)
    leave_lane()
    stop_recording()
    work()
