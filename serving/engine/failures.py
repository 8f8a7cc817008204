"""Picks the report that names the cause when engines fail.

One failure causes many reports. The failed rank sends its error and exits; ranks that shared its step report a failed
peer, sometimes earlier; and the exit of every process is noticed. So after the first report the client waits a moment
for others, and uses the best one:

    1   a rank's own error
    2   a process that ended without a report (a process that sent one ends, too)
    3   a rank that reports a failed peer
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from serving.engine.wire.messages import Failed, make_error
from serving.requests import EngineDead
from ubatch import ConfigError, UBatchError

__all__ = ["FirstCause", "dead_error", "start_error"]

_GRACE_S = 0.5
"""How long to wait for the report of a process that has ended, in seconds."""
_ECHO_GRACE_S = 3.0
"""How long to wait for the failed peer's own report after a rank reported a failed peer, in seconds."""


class FirstCause:
    """Collects reports, and decides once which one names the cause."""

    def __init__(self, decided: Callable[[Failed], None]) -> None:
        self._decided = decided
        self._reports: dict[int, Failed] = {}
        self._over = False

    def report(self, failed: Failed) -> None:
        """Take a report: a rank failed, a rank noticed a failed peer, or a process ended without a report."""
        if self._over or (failed.rank in self._reports and not failed.traceback):
            return
        self._reports[failed.rank] = failed
        asyncio.get_running_loop().call_later(_grace_s(failed), self._decide)  # the first of them decides

    def close(self) -> None:
        """Ignore all further reports."""
        self._over = True

    def _decide(self) -> None:
        if not self._over:
            self.close()
            self._decided(min(self._reports.values(), key=_grace_s))


def _grace_s(failed: Failed) -> float:
    """How long to wait for a better report, in seconds: the better this one is, the shorter."""
    if failed.echo:
        return _ECHO_GRACE_S
    return 0.0 if failed.traceback else _GRACE_S


def start_error(failed: Failed, name: str) -> UBatchError:
    """The error of a failed start: the rank's own error if it concerns the settings or the checkpoint."""
    error = make_error(failed.kind, failed.text)
    if isinstance(error, ConfigError) or (error is not None and failed.kind.startswith("Checkpoint")):
        error.add_note(f"on {name}")
        return error
    return dead_error(failed, name, "did not start")


def dead_error(failed: Failed, name: str, what: str = "failed") -> EngineDead:
    """An error with one line that names the rank and the cause, and the rank's traceback as a note."""
    if not failed.traceback:
        return EngineDead(f"{name} {failed.text}.")
    first_line = failed.text.partition("\n")[0]  # a time-out, for example, goes on with the stack of every lane
    error = EngineDead(f"{name} {what}: {failed.name}: {first_line}")
    error.add_note(f"on {name}:\n{failed.traceback}")
    return error
