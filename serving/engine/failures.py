"""When engines fail: which of the reports names the cause.

One failure is seen many times. The rank that failed says so and exits; ranks that shared its step say that a peer
failed, sometimes before; and every process's exit is noticed. So after the first report the others are waited for, a
moment, and the best one counts:

    1   a rank's own error
    2   a process that ended without a word (one that did say something ends, too)
    3   a rank that felt a peer fail
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from serving.engine.wire.messages import Failed, make_error
from serving.requests import EngineDead
from ubatch import ConfigError, UBatchError

__all__ = ["FirstCause", "again", "dead_error", "start_error"]

_GRACE_S = 0.5
"""How long a process that has ended without a word may have one under way."""
_ECHO_GRACE_S = 3.0
"""How long after a rank that felt a peer fail the peer's own report may come."""


class FirstCause:
    """Collects reports, and decides once.

    Args:
        decided: called with the report that counts.
    """

    def __init__(self, decided: Callable[[Failed], None]) -> None:
        self._decided = decided
        self._reports: dict[int, Failed] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def report(self, failed: Failed) -> None:
        """A rank failed, or felt another one fail, or its process ended without a word."""
        known = self._reports.get(failed.rank)
        if self._over or (known is not None and _weight(failed) == _SILENT):
            return
        self._reports[failed.rank] = failed
        delay = {_OWN: 0.0, _SILENT: _GRACE_S, _ECHO: _ECHO_GRACE_S}[_weight(failed)]
        until = asyncio.get_running_loop().time() + delay
        if self._timer is None or until < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(until, self._decide)

    def close(self) -> None:
        """Decide nothing any more."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()

    def _decide(self) -> None:
        self.close()
        self._decided(min(self._reports.values(), key=_weight))


_OWN, _SILENT, _ECHO = 1, 2, 3


def _weight(failed: Failed) -> int:
    if failed.echo:
        return _ECHO
    return _OWN if failed.traceback else _SILENT


def start_error(failed: Failed, name: str) -> UBatchError:
    """What a failed start raises: the rank's own error where it is about the settings or the checkpoint.

    Args:
        failed: the report that counts.
        name: what to call the rank.
    """
    error = make_error(failed.kind, failed.text)
    if isinstance(error, ConfigError) or (error is not None and failed.kind.startswith("Checkpoint")):
        error.add_note(f"on {name}")
        return error
    return dead_error(failed, name, "did not start")


def dead_error(failed: Failed, name: str, what: str = "failed") -> EngineDead:
    """One line that names the rank and the cause; its traceback is a note. Arguments as for `start_error`."""
    if not failed.traceback:
        return EngineDead(f"{name} {failed.text}.")
    first_line = failed.text.partition("\n")[0]  # of a time-out, for one, the rest is every lane's stack
    error = EngineDead(f"{name} {what}: {failed.name}: {first_line}")
    error.add_note(f"on {name}:\n{failed.traceback}")
    return error


def again(dead: EngineDead) -> EngineDead:
    """The same error anew, for each that waits: one raised twice would carry both tracebacks."""
    error = EngineDead(str(dead))
    for note in getattr(dead, "__notes__", ()):
        error.add_note(note)
    return error
