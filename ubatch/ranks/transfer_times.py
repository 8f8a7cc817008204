"""When transfers were launched and arrived, for whoever asks: plain records, without a trace.

    with record_transfers() as arrivals:
        step()                     # its lanes' transfers, too: the caller's context travels into lanes

Without a recorder a transfer costs nothing more; with one, about a microsecond.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import cast

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
