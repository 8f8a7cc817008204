"""The longest wait for a transfer that neither a connection's nor a lane's time-out would end."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from contextvars import ContextVar

from ubatch.process.interrupts import changing

__all__ = ["transfer_limit_s", "transfers_end_within"]


class _Limit(changing["weakref.ref[_Limit] | None"]):
    """A limit in seconds, and its `with` block. It ends with the block, even if Ctrl-C interrupted that."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__(_limit, weakref.ref(self))
        self.seconds = seconds


_limit: ContextVar[weakref.ref[_Limit] | None] = ContextVar("ubatch_transfer_limit", default=None)


def transfer_limit_s() -> float | None:
    """Seconds that a wait may take if no lane and no connection ends it; None: no limit."""
    reference = _limit.get()
    limit = None if reference is None else reference()
    return None if limit is None else limit.seconds


def transfers_end_within(seconds: float | None) -> AbstractContextManager[object]:
    """In the `with` block, a wait for a transfer without a connection raises `TransferTimeout` after `seconds`.

    For code outside lanes, where no hang check runs. A work that ignores the time-out passed to it cannot be ended.

    Args:
        seconds: None waits for ever.
    """
    return _Limit(seconds)
