"""What is noted of transfers, and done, while a step waits for them.

When transfers were launched and arrived, for whoever asks: plain records, without a trace. Without a recorder a
transfer costs nothing more; with one, about a microsecond.

    with record_transfers() as arrivals:
        step()                     # its lanes' transfers, too: the caller's context travels into lanes

Work for the gaps of a step: the times in which it waits for a transfer, and no lane computes.

    with in_gaps(work):
        step()                     # its lanes' gaps, too

`work()` is called where a wait begins whose transfer has not arrived, in the thread that waits. It should be short, as
it may end after the transfer's arrival. It runs outside of the lane: what it launches is none of the lane's transfers.
An error in it is an error of the wait. Its own waits are no gaps. A transfer that only the device waits for gives none.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import cast

from ubatch.lanes.context import leave_lane
from ubatch.process.interrupts import changing


@dataclass(frozen=True, slots=True)
class Arrival:
    """A transfer that was waited for, in seconds of `time.monotonic`.

    Attributes:
        name: the transfer's.
        launched: when it was launched.
        waited: when the wait for it began.
        arrived: when it arrived, as far as the host knows: the end of the wait, or an emulated link's deadline.
        cpu_s: CPU seconds of this process during the wait: the transport's own copies. 0 in a lane.
    """

    name: str
    launched: float
    waited: float
    arrived: float
    cpu_s: float = 0.0


_arrivals: ContextVar[list[Arrival] | None] = ContextVar("arrivals", default=None)


def record_transfers() -> AbstractContextManager[list[Arrival]]:
    """Record the transfers that are launched in the `with` block, in the order in which their waits end."""
    return cast("AbstractContextManager[list[Arrival]]", changing(_arrivals, []))


arrivals_now = _arrivals.get
"""Returns the list that transfers launched now are recorded in; None if nobody asks."""


def stop_recording() -> None:
    """Do not record what is launched from here on, in this context."""
    _arrivals.set(None)


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
