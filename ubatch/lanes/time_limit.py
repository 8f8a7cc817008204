"""How long a wait for a transfer may take where neither a connection nor a lane's time-out would end it."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from contextvars import ContextVar

from ubatch.process.interrupts import changing

__all__ = ["transfer_limit_s", "transfers_end_within"]


class _Limit:
    """How long a wait may take; gone with the block that set it, also where Ctrl-C has left that open."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds


class _Within(changing["weakref.ref[_Limit] | None"]):
    """The block that keeps a limit alive."""

    __slots__ = ("_limit",)

    def __init__(self, limit: _Limit) -> None:
        super().__init__(_limit, weakref.ref(limit))
        self._limit = limit


_limit: ContextVar[weakref.ref[_Limit] | None] = ContextVar("ubatch_transfer_limit", default=None)


def transfer_limit_s() -> float | None:
    """How long the wait for a transfer may take where no lane and no connection ends it; None for ever."""
    reference = _limit.get()
    limit = None if reference is None else reference()
    return None if limit is None else limit.seconds


def transfers_end_within(seconds: float | None) -> AbstractContextManager[object]:
    """End the wait for a transfer without a connection, in the `with` block, by `TransferTimeout` after `seconds`.

    For where no lane's time-out would find it. A work that takes no regard of the time-out it is given cannot be ended.

    Args:
        seconds: None waits for ever.
    """
    return _Within(_Limit(seconds))
