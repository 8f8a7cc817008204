"""Starts, watches and ends the engine processes of one node."""

import atexit
import logging
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import current_process
from threading import Event
from typing import TypeAlias

from serving.engine.kept import KeptOfRank, clear_steps, read_steps
from serving.engine.options import EngineOptions
from serving.engine.restarts import RestartReason
from serving.engine.wire.messages import Failed, RankFound
from serving.engine.wire.rendezvous import Place
from serving.fork_server import ForkedProcess
from serving.logs import log_event
from serving.processes import how_it_ended, is_dead, kill, process_state
from ubatch import ConfigError, UBatchError

_logger = logging.getLogger(__name__)

EngineMain: TypeAlias = Callable[[EngineOptions, int, Place], None]
"""Main function of a rank's process, called as `run_engine(options, rank, place)`. It must be a module-level function,
so that it can be pickled."""


_FILES, _FILES_PER_RANK = 24, 6
"""Most descriptors that the launching process was seen to need: for itself, and for each of its ranks; no clients."""
_FILES_OF_RANK, _FILES_PER_PEER = 48, 8
"""The same of a rank that steps with others: for itself, and for each of them."""
_FILES_PER_MOVER = 2
"""And for each of them, if experts move."""


def require_descriptors(options: EngineOptions) -> None:
    """Check, before anything is started, that this process and its engines may open as many files as they need.

    Raises:
        ConfigError: they may not; without descriptors a start hangs.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    here = _FILES + _FILES_PER_RANK * options.local_size
    per_peer = _FILES_PER_PEER + _FILES_PER_MOVER * options.enable_eplb
    engine = _FILES_OF_RANK + per_peer * options.step_size if options.step_size > 1 else _FILES
    needed = max(here, engine)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise ConfigError(
            f"a process of this run needs at least {needed} open files (ranks on this machine: {options.local_size}), "
            f"and the limit is {soft}. Raise it: ulimit -n {needed}, and more for clients."
        )


_LOOK_S = 0.5
"""How often whoever waits for ranks looks whether they have ended, though that is not told, in seconds."""
_UNGUARDED = 78
"""Exit status of a rank whose main module would start ranks itself while it is imported."""
_UNGUARDED_TEXT = (
    'the script starts its ranks outside `if __name__ == "__main__":`. Ranks are processes that import the script, so '
    "each would start ranks of its own. Put what the script does into a function, and call it behind that line."
)


def refuse_unguarded_main() -> None:
    """End this process, if it is a rank that still imports the script that has started it; `LocalEngines` says why."""
    if getattr(current_process(), "_inheriting", False):  # what multiprocessing's own check looks at
        sys.exit(_UNGUARDED)


class LocalEngines:
    """Starts one process for every rank of this node. They end with this process at the latest.

    Args:
        kept: rank -> what its earlier process has left, and what its later one will get; empty where ranks are not
            started again.
        abandoned: set by another thread, it ends a start that is under way.

    Raises:
        CannotFork: the process that forks ranks has ended, or does not answer; or the start was abandoned.
    """

    def __init__(
        self,
        options: EngineOptions,
        place: Place,
        main: EngineMain,
        kept: Mapping[int, KeptOfRank] | None = None,
        abandoned: Event | None = None,
    ) -> None:
        self.ranks = options.local_ranks
        self._kept = kept or {}
        places = {rank: replace(place, kept=self._kept.get(rank)) for rank in self.ranks}
        for each in self._kept.values():
            clear_steps(each.steps)
        atexit.register(self.kill)
        self._processes = {
            rank: ForkedProcess(
                target=main, args=(options, rank, places[rank]), name=f"rank {rank}", abandoned=abandoned
            )
            for rank in self.ranks
        }
        try:
            for process in self._processes.values():
                process.start()
        except BaseException:
            self.kill()
            raise

    @property
    def sentinels(self) -> dict[int, int]:
        """Rank -> a file descriptor that becomes readable when its process ends."""
        return {rank: process.sentinel for rank, process in self._processes.items()}

    @property
    def pids(self) -> dict[int, int | None]:
        """Rank -> process id."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def exit_status(self, rank: int) -> int | None:
        """The exit status of a rank's process, negative for a signal; None while it lives."""
        return self._processes[rank].exitcode

    def ended(self, rank: int) -> Failed:
        """The report of a rank whose process has ended."""
        how, status = how_it_ended(self._processes[rank]), self.exit_status(rank)
        if status == _UNGUARDED:
            return Failed(rank, _UNGUARDED_TEXT, kind=ConfigError.__name__)
        if status is not None and status < 0:
            return Failed(rank, how, reason=RestartReason.KILLED, signal=-status)
        return Failed(rank, how, reason=RestartReason.EXITED)

    def found(self) -> dict[int, RankFound]:
        """What each rank was doing when it ended, or does now, and the state of its process. Call it before the ranks
        are killed."""
        states = {rank: process_state(process.pid) for rank, process in self._processes.items()}
        return {rank: RankFound(read_steps(kept.steps), states[rank]) for rank, kept in self._kept.items()}

    def join(self, timeout_s: float) -> bool:
        """Wait until all processes have ended; returns False if some still run after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        alive = [process for process in self._processes.values() if process.is_alive()]
        while alive and (left := deadline - time.monotonic()) > 0:
            wait([process.sentinel for process in alive], min(left, _LOOK_S))
            alive = [process for process in alive if process.is_alive() and not is_dead(process.pid)]
        return not alive

    def kill(self) -> None:
        """Kill the processes that still run, and wait for them. Nobody may watch `sentinels` any more.

        Raises:
            UBatchError: one does not end.
        """
        atexit.unregister(self.kill)
        all_of_them = self._processes.values()
        left = kill(all_of_them)
        untold = [each for each in all_of_them if each.pid and each.exitcode is None and each not in left]
        named = [f"{process.name} (process {process.pid}, in state {process_state(process.pid)})" for process in left]
        for process in untold:
            process.give_up_server()
        for process in all_of_them:
            process.release()
        if left:
            raise UBatchError(
                f"{', '.join(named)} was killed and does not end. It waits for a driver or a disk, and may hold memory "
                f"of a device."
            )
        if untold:
            log_event(_logger, "the process that forks ranks does not answer: another one begins", level=logging.ERROR)
