"""A pool's crew: the threads and shared objects that one `LanePool` keeps from step to step.

job       one lane's part of one step
worker    a daemon thread that waits for jobs and holds no reference to the pool
crew      the workers, contexts, baton and barriers, which are replaced together
"""

import contextvars
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from ubatch.errors import note
from ubatch.lanes.ambient import Ambient
from ubatch.lanes.baton import Baton
from ubatch.lanes.context import UBatchContext
from ubatch.lanes.one_core import CoreOfSteps
from ubatch.lanes.wakeup import Gate, WakeUp, make_wakeup
from ubatch.process.interrupts import is_inside
from ubatch.streams.lane_streams import abandon_transfers

UNWIND_S = 5.0
"""Seconds that aborted lanes have to unwind before their threads are abandoned."""


@dataclass
class Job:
    """One lane's part of one step: the function to run and its state. The worker fills in the result or error."""

    context: UBatchContext
    body: Callable[[], Any]
    ambient: Ambient
    variables: contextvars.Context
    part: Callable[[], AbstractContextManager[None]] = nullcontext
    result: Any = None
    error: BaseException | None = None
    ended: bool = False

    def run(self) -> None:
        """Run the body, in the worker's thread."""
        try:
            self.variables.run(self._run_in_context)
        except BaseException as error:
            self.error = error
        if self.context.baton.forked:  # the child has no caller to return to
            traceback.print_exception(self.error)
            os._exit(1)
        self.ended = True

    def forget(self) -> None:
        """Drop references to tensors. A stored error would otherwise keep the job, its body and tracebacks alive."""
        self.error = self.result = None
        self.body = lambda: None

    def _run_in_context(self) -> None:
        with self.ambient.applied(), self.part(), self.context:
            self.result = self.body()


@dataclass
class Worker:
    """A thread, its mailbox, and the gate where it reports that a job has ended."""

    name: str
    done: Gate
    wake: WakeUp = field(default_factory=make_wakeup)
    job: Job | None = None

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=_work, args=(self,), name=self.name, daemon=True)

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
        job.run()
        del job  # so that it keeps no tensors alive after the step
        worker.done.arrive()


@dataclass
class Crew:
    """Contexts, baton, barriers and threads of a pool, which are replaced together.

    Attributes:
        driver: code object of `LanePool.run`; while a step runs, this crew is its local variable `crew`.
        in_step: whether a step has begun, or the crew is new, and no step has completed since.
        thread: identifier of the thread that runs the step.
        patient: whether the step runs without the hang check.
        core_of_steps: whether the lanes share a core; None on a CPU.
    """

    contexts: list[UBatchContext]
    ready: Gate
    done: Gate
    workers: list[Worker]
    driver: CodeType
    core_of_steps: CoreOfSteps | None
    pid: int = field(default_factory=os.getpid)
    in_step: bool = True
    thread: int = 0
    patient: bool = False

    @property
    def baton(self) -> Baton:
        """The baton that all lanes share."""
        return self.contexts[0].baton

    def settle(self) -> None:
        """End the step for the caller. Transfers still in flight are kept alive separately."""
        abandon_transfers([transfer for context in self.contexts for transfer in context.settle()])

    def discard(self) -> None:
        """Tell the threads to stop, without waiting for them. May be called more than once."""
        if self.pid != os.getpid():
            return
        self.baton.discard()
        for worker in self.workers:
            worker.give(None)
            if self.baton.core is not None and worker.thread.is_alive():
                self.baton.core.free(worker.thread.native_id or 0)
        self.settle()

    def dismiss(self) -> None:
        """Stop the threads after the current step; does nothing in a forked child, which has none."""
        if self.in_step and not is_inside(self.thread, self.driver, "crew", self):
            self.discard()
            return
        if self.pid != os.getpid():
            return
        for worker in self.workers:
            worker.give(None)
        for worker in self.workers:
            if worker.thread.is_alive() and worker.thread is not threading.current_thread():
                worker.thread.join(timeout=UNWIND_S)


def note_lane(error: BaseException, context: UBatchContext, lanes: int) -> None:
    """Add a note to an error: in which lane it was raised, and the lane's last point."""
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
