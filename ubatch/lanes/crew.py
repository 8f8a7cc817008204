"""A pool's threads and what they share: the crew that one `LanePool` keeps from step to step.

job       one lane's part of one step
worker    a thread that waits for jobs; a daemon, which holds no reference to the pool
crew      the workers, contexts, baton and barriers that belong together and are replaced together
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NoReturn

from ubatch.errors import note
from ubatch.lanes.ambient import Ambient
from ubatch.lanes.baton import Baton
from ubatch.lanes.context import UBatchContext
from ubatch.lanes.wakeup import Gate, WakeUp, make_wakeup
from ubatch.process.interrupts import is_inside
from ubatch.streams.lifetimes import abandon_transfers

__all__ = ["UNWIND_S", "Crew", "Job", "Worker", "note_lane", "report"]

UNWIND_S = 5.0
"""How long lanes that were told to abort may take before their threads are abandoned."""


@dataclass
class Job:
    """One lane's part of one step: what to run, in which state; the worker fills in how it ended."""

    context: UBatchContext
    body: Callable[[], Any]
    ambient: Ambient
    variables: contextvars.Context
    done: Gate
    part: Callable[[], AbstractContextManager[None]] = nullcontext
    result: Any = None
    error: BaseException | None = None
    ended: bool = False

    def run(self) -> None:
        """Run in the worker's thread, which then arrives at `done`."""
        try:
            self.variables.run(self._run_in_context)
        except BaseException as error:
            self.error = error
        if self.context.baton.forked:
            _end_forked_child(self.error)
        self.ended = True

    def forget(self) -> None:
        """Let go of tensors: an error that lives on holds the job, its body and the other lanes' tracebacks."""
        self.error = self.result = None
        self.body = _nothing

    def _run_in_context(self) -> None:
        with self.ambient.applied(), self.part(), self.context:
            self.result = self.body()


def _nothing() -> None:
    """What a job runs that has run."""


@dataclass
class Worker:
    """A thread and its mailbox."""

    name: str
    wake: WakeUp = field(default_factory=make_wakeup)
    job: Job | None = None
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: the process has as many threads as it may have.
        """
        self.thread = threading.Thread(target=_work, args=(self,), name=self.name, daemon=True)
        self.thread.start()

    def give(self, job: Job | None) -> None:
        """Hand over a job, or None to stop."""
        self.job = job
        self.wake.set()


def _work(worker: Worker) -> None:
    while True:
        worker.wake.wait()
        job, worker.job = worker.job, None
        if job is None:
            break
        done = job.done
        job.run()
        del job  # once the step is over it keeps no tensors alive
        done.arrive()


def _end_forked_child(error: BaseException | None) -> NoReturn:
    """The lane was forked and its copy ran to the end. There is no caller to return to, so the child process ends."""
    traceback.print_exception(error)
    os._exit(1)


@dataclass
class Crew:
    """All that belongs together and is replaced together: contexts, baton, barriers, threads.

    Attributes:
        driver: the code of `LanePool.run`, whose local variable `crew` this is while a step runs.
        in_step: it was made, or a step began, and no step has run its course since.
        thread: whose step that is.
        patient: the step is one of those that may take very long.
    """

    contexts: list[UBatchContext]
    ready: Gate
    done: Gate
    workers: list[Worker]
    driver: CodeType
    pid: int = field(default_factory=os.getpid)
    in_step: bool = True
    thread: int = 0
    patient: bool = False

    @property
    def baton(self) -> Baton:
        """The one of all lanes."""
        return self.contexts[0].baton

    def settle(self) -> None:
        """The step is over for the caller: what is still under way is kept alive by itself."""
        abandon_transfers([transfer for context in self.contexts for transfer in context.settle()])

    def discard(self) -> None:
        """Let the threads stop as soon as they can, without waiting for them. May be called again."""
        if self.pid != os.getpid():
            return
        self.baton.discard()
        for worker in self.workers:
            worker.give(None)
        self.settle()

    def dismiss(self) -> None:
        """Stop the threads, after the step that runs; in a forked child there are none."""
        if self.in_step and not is_inside(self.thread, self.driver, "crew", self):
            self.discard()
            return
        if self.pid != os.getpid():
            return
        for worker in self.workers:
            worker.give(None)
        for worker in self.workers:
            if worker.thread is not None and worker.thread is not threading.current_thread():
                worker.thread.join(timeout=UNWIND_S)


def note_lane(error: BaseException, context: UBatchContext, lanes: int) -> None:
    """Say on an error in which lane it was raised, and how far that had come."""
    note(
        error,
        f"raised in lane {context.id} of {lanes}, last point {str(context.last_point)!r}, "
        f"{context.points_passed} points passed",
    )


def report(contexts: Sequence[UBatchContext]) -> str:
    """Every lane's last point and stack."""
    frames = sys._current_frames()
    parts = []
    for context in contexts:
        frame = frames.get(context.thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "  (no stack)\n"
        where = f"last point {context.last_point!r}, {context.points_passed} points passed"
        waiting = f", waiting for {context.waiting!r}" if context.waiting else ""
        parts.append(f"lane {context.id}: {where}{waiting}\n{stack}")
    return "".join(parts)
