"""The longest wait for a transfer that neither a connection's nor a lane's time-out would end."""

from __future__ import annotations

import weakref
from contextvars import ContextVar

from ubatch.process.interrupts import changing


class transfers_end_within(changing["weakref.ref[transfers_end_within] | None"]):  # noqa: N801 - as `changing`
    """In the `with` block, a wait for a transfer without a connection raises `TransferTimeout` after `seconds`.

    For code outside lanes, where no hang check runs. A work that ignores the time-out passed to it cannot be ended. The
    limit ends with the block, even if Ctrl-C interrupted that.

    Args:
        seconds: None waits for ever.
    """

    def __init__(self, seconds: float | None) -> None:
        super().__init__(_limit, weakref.ref(self))
        self.seconds = seconds


_limit: ContextVar[weakref.ref[transfers_end_within] | None] = ContextVar("ubatch_transfer_limit", default=None)


def transfer_limit_s() -> float | None:
    """Seconds that a wait may take if no lane and no connection ends it; None: no limit."""
    reference = _limit.get()
    limit = None if reference is None else reference()
    return None if limit is None else limit.seconds
