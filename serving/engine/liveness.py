"""The one place that says which rank has failed, and why: `rank 3 hangs: ...`, `rank 1 was killed by SIGKILL`.

All signs of life and of death go to a `Liveness`, whoever notices them:

    a process ended      its sentinel (`LocalEngines.ended`); on other nodes their supervisors send it as `Failed`
    a rank's own error   `Failed`, with a traceback; `echo` if it only noticed a failed peer
    silence              ranks send `Alive`, nodes send `NodeAlive`; too long without one is a failure

Silence that is too long:

    rank    while all start: five times `--timeout-s`, at least 60 s; from `begin` on: `--timeout-s` plus the silence
            announced by it or by a rank that steps with it
    node    five minutes to join (when engines are started again, `--timeout-s`), then `--timeout-s` between two
            messages, but at most 15 s

Only the time in which this process was running counts (`WatchedTime`), not while it was stopped or its machine slept.
A node's supervisor watches node 0 by the same clock and the same limits.

One failure causes many reports. The failed rank sends its error and exits; ranks that shared its step report a failed
peer, sometimes earlier; and the exit of every process is noticed. So after the first report `Liveness` waits a moment
for others, decides once, and uses the best one:

    1   a rank's own error
    2   a process that ended without a report (a process that sent one ends, too)
    3   a rank that reports a failed peer
"""

import asyncio
import time
from collections.abc import Callable

from serving.engine.options import EngineOptions
from serving.engine.restarts import RestartReason
from serving.engine.wire.messages import Alive, Failed, make_error
from serving.requests import EngineDead
from ubatch import ConfigError, UBatchError

_START_SILENCES, _LEAST_START_S = 5, 60.0
"""Of a rank that starts: its heart beats in a thread, which imports and compilers may hold up."""
_NODE_JOINS_S = 300.0
_NODE_SILENT_S = 15.0
_NODE_BEAT_S = 2.0
_BEATS_PER_SILENCE = 4
_LOOK_S = 0.5
_LOOKS_PER_TIMEOUT = 10
_GRACE_S = 0.5
"""How long to wait for the report of a process that has ended, in seconds."""
_ECHO_GRACE_S = 3.0
"""How long to wait for the failed peer's own report after a rank reported a failed peer, in seconds."""


def node_silent_s(timeout_s: float) -> float:
    """Seconds after which a node that says nothing cannot be reached. Its supervisor has nothing else to do."""
    return min(timeout_s, _NODE_SILENT_S)


def node_beat_s(timeout_s: float) -> float:
    """Seconds between two heartbeats of a node."""
    return min(node_silent_s(timeout_s) / _BEATS_PER_SILENCE, _NODE_BEAT_S)


class WatchedTime:
    """Seconds in which this process has watched others.

    Args:
        every_s: seconds between two calls of `look`; of a longer gap only twice as much counts.
    """

    def __init__(self, every_s: float) -> None:
        self.now = 0.0
        self.every_s = every_s
        self._last = time.monotonic()

    def look(self) -> float:
        """Count the time since the last call; returns the total."""
        last, self._last = self._last, time.monotonic()
        self.now += min(self._last - last, 2 * self.every_s)
        return self.now


class Liveness:
    """Takes the signs of life and the reports of a run, from its start to its first failure.

    Args:
        decided: called once, with the report that names the cause.
        node_joins_s: how long other nodes may take to join, in seconds.
    """

    def __init__(
        self, options: EngineOptions, decided: Callable[[Failed], object], node_joins_s: float | None = None
    ) -> None:
        self._options, self._decided = options, decided
        self._timeout_s = options.dbo.timeout_s
        self._start_s = max(_START_SILENCES * self._timeout_s, _LEAST_START_S)
        self._clock = WatchedTime(min(_LOOK_S, self._timeout_s / _LOOKS_PER_TIMEOUT))
        self._node_joins_s = _NODE_JOINS_S if node_joins_s is None else node_joins_s
        self._nodes = dict.fromkeys(range(1, options.nnodes), self._node_joins_s)
        self._heard = dict.fromkeys(options.local_ranks, 0.0)  # when the last heartbeat of a rank arrived
        self._silence_s: dict[int, float] = {}  # the silence that it announced
        self._begun = False
        self._reports: dict[int, Failed] = {}
        self._over = False

    # -- signs of life ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """All ranks are ready: check their heartbeats from now on."""
        self._begun = True
        self._heard = dict.fromkeys(range(self._options.world_size), self._clock.now)

    def heard(self, alive: Alive) -> None:
        """Record a heartbeat. If an announced silence ends, the time-outs of ranks that step together start again."""
        before = self._silence_s.get(alive.rank, 0.0)
        self._heard[alive.rank], self._silence_s[alive.rank] = self._clock.now, alive.silence_s
        if alive.silence_s < before:
            for rank in self._heard.keys() & self._options.together(alive.rank):
                self._heard[rank] = self._clock.now

    def heard_node(self, node_rank: int) -> None:
        """Record a `NodeAlive` message. The first one tells that the node's ranks are starting."""
        first = node_rank * self._options.local_size
        for rank in range(first, first + self._options.local_size):
            self._heard.setdefault(rank, self._clock.now)
        self._nodes[node_rank] = self._clock.now + node_silent_s(self._timeout_s)

    # -- reports ------------------------------------------------------------------------------------------------

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

    # -- silence ------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Check regularly, until cancelled."""
        while True:
            await asyncio.sleep(self._clock.every_s)
            self._clock.look()
            for failed in self._silent():
                self.report(failed)

    def _silent(self) -> list[Failed]:
        """Every node that is silent for too long, and one rank."""
        now, found = self._clock.now, []
        for node, until in self._nodes.items():
            if now > until:
                rank = node * self._options.local_size
                what = "cannot be reached" if rank in self._heard else f"has not joined within {self._node_joins_s:g} s"
                found.append(Failed(rank, f"is lost: node {node} {what}", reason=RestartReason.UNREACHABLE))
        silent = [
            rank
            for rank, heard in self._heard.items()
            if now - heard > self._patience_s(rank) and not any(map(self._is_unreachable, self._options.together(rank)))
        ]
        if silent:  # ranks that wait for a hung one on a device also go silent, but later: report the first
            what = f"hangs: it has given no sign of life for {self._timeout_s:g} s (timeout_s)"
            if not self._begun:
                what = f"hangs while it starts: it has given no sign of life for {self._start_s:g} s"
            first = min(silent, key=self._heard.__getitem__)
            found.append(Failed(first, what, reason=RestartReason.HUNG))
        return found

    def _is_unreachable(self, rank: int) -> bool:
        """Whether the rank's node is silent, too: then the node is to be named, and no rank that waits for it."""
        until = self._nodes.get(rank // self._options.local_size)
        beat_s = node_beat_s(self._timeout_s)
        return until is not None and until - self._clock.now < node_silent_s(self._timeout_s) - 2 * beat_s

    def _patience_s(self, rank: int) -> float:
        """Seconds that a rank may be silent. Includes silence announced by ranks that step with it: it may wait for
        them on a device, where it cannot send heartbeats."""
        if not self._begun:
            return self._start_s
        return self._timeout_s + max(self._silence_s.get(each, 0.0) for each in self._options.together(rank))


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
    first_line = failed.text.partition("\n")[0]  # a time-out, for example, goes on with the stack of every lane
    if not failed.traceback:
        return EngineDead(f"{name} {first_line}.")
    error = EngineDead(f"{name} {what}: {failed.name}: {first_line}")
    error.add_note(f"on {name}:\n{failed.traceback}")
    return error
