"""Time limit for waiting on a transfer that neither a connection's nor a lane's time-out would end."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from contextvars import ContextVar

from ubatch.process.interrupts import changing

__all__ = ["transfer_limit_s", "transfers_end_within"]


class _Limit:
    """A time limit in seconds. It ends with the block that set it, even if Ctrl-C interrupted the block."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds


class _Within(changing["weakref.ref[_Limit] | None"]):
    """The `with` block that keeps a limit alive."""

    __slots__ = ("_limit",)

    def __init__(self, limit: _Limit) -> None:
        super().__init__(_limit, weakref.ref(limit))
        self._limit = limit


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
    return _Within(_Limit(seconds))
