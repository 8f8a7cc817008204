"""The lanes' threads: started once, parked between steps, replaced when one hangs.

A step, in pseudo-code:
    prepare the contexts and the baton
    give every worker its job; each enters its ambient state and its context, and reports at the ready barrier
    when all are parked and warm, begin the capture if there is one, and give the baton to lane 0
    sleep until all lanes have ended; wake regularly to check whether one holds the baton for too long
    return the results, or raise the first failure with its traceback

A crew (threads, contexts, baton, barriers: `ubatch.lanes.crew`) is kept from step to step. After a step that did not
complete (a lane hung or could not start, or Ctrl-C) a wake-up may be left over, so the whole crew is replaced. The crew
is marked while a step runs; if Ctrl-C leaves the mark set, the next step finds it and makes a new crew.

Threads are daemons and hold no reference to the pool, so a pool that is dropped closes itself. After a fork the
child has no workers; its next step makes new ones.
"""

import contextvars
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ubatch.errors import ConfigError, LaneAborted, UBatchError, UBatchTimeout, describe, note
from ubatch.lanes.ambient import Ambient
from ubatch.lanes.baton import Baton
from ubatch.lanes.context import UBatchContext, current_lane, make_ubatch_contexts, transfers_end_within
from ubatch.lanes.crew import UNWIND_S, Crew, Job, Worker, note_lane, report
from ubatch.lanes.one_core import CoreOfSteps
from ubatch.lanes.wakeup import Gate
from ubatch.process.heartbeat import beat
from ubatch.schedules.forward_context import ForwardContext
from ubatch.schedules.schedule import Schedule
from ubatch.streams.graph_protocols import Capture
from ubatch.streams.lane_streams import abandon_transfers
from ubatch.streams.streams import StreamBackend, make_streams, merge_sm_use, share_out_sms

_LOOK_UP_S = 0.5
"""Seconds between two checks for hung lanes; a hang is noticed at most this much late."""


@dataclass
class PoolCounts:
    """Counts since a pool was made.

    Attributes:
        steps: steps run in lanes.
        threads_started: worker threads made; more than the lanes means some were replaced.
        sm_users: name -> whether that kernel or back end keeps to the SM budget (`ubatch.SMBudget`).
    """

    steps: int = 0
    handoffs: int = 0
    threads_started: int = 0
    sm_users: dict[str, bool] = field(default_factory=dict)


class LanePool:
    """Persistent lanes.

    Args:
        lanes: how many, at least 2.
        timeout_s: a lane that holds the baton longer counts as hung.

    Attributes:
        counts: what it has done so far.
        failure: the lane that failed in the last step, and the last point it had passed; None if none did.
    """

    def __init__(
        self, lanes: int, device: torch.device, timeout_s: float, streams: StreamBackend | None = None
    ) -> None:
        self.lanes = lanes
        self.timeout_s = timeout_s
        self.failure: tuple[int, str] | None = None
        self._on_one_core = device.type == "cuda"
        self._streams = streams if streams is not None else make_streams(device)
        self._comm_stream = self._streams.new_stream()
        self._crew: Crew | None = None
        self._closer: weakref.finalize[..., Any] | None = None
        self.counts = PoolCounts()

    def run(
        self,
        bodies: Sequence[Callable[[], Any]],
        schedule: Schedule,
        forward_contexts: Sequence[ForwardContext | None],
        voted_ranks: frozenset[int] = frozenset(),
        capture: Capture | None = None,
        *,
        patient: bool = False,
    ) -> list[Any]:
        """Run one body per lane and return their results in lane order.

        Args:
            bodies: one per lane.
            forward_contexts: one per lane.
            voted_ranks: global ranks that agreed to this split.
            capture: begun when all lanes are parked; every lane runs inside it. The caller ends it.
            patient: whether to skip the hang check; a capture always skips it.

        Raises:
            UBatchTimeout: a lane held the baton too long.
            UBatchError: called inside a lane; or a lane's thread could not be started.
            BaseException: the first failing lane's error, with a note that names the lane.
        """
        outer = current_lane()
        if outer is not None:
            raise UBatchError(f"a pool of lanes was entered from inside lane {outer.id}.")
        self.failure = None
        crew = self._crew_for_a_step()
        try:
            crew.patient = patient or capture is not None
            crew.baton.prepare(schedule.lead)
            if crew.core_of_steps is not None:
                kind = schedule, *(None if each is None else each.mode for each in forward_contexts)
                crew.baton.core = crew.core_of_steps.begin_step(kind, patient=crew.patient)
            crew.ready.close_again()
            crew.done.close_again()
            ambient, compute_stream = Ambient.capture(), self._streams.current()
            sm_budget = share_out_sms(schedule.comm_sms, self._streams)
            jobs = []
            for context, body, forward_context in zip(crew.contexts, bodies, forward_contexts, strict=True):
                context.begin_step(forward_context, schedule, voted_ranks, compute_stream, sm_budget)
                jobs.append(Job(context, body, ambient, contextvars.copy_context()))
                if capture is not None:
                    jobs[-1].part = capture.part
            self.counts.steps += 1
            if self._watch(crew, jobs, capture):
                self._count(crew)
                crew.settle()
                crew.in_step = False
        finally:
            try:
                if crew.in_step:
                    self._discard()
            finally:
                if crew.core_of_steps is not None:
                    crew.core_of_steps.end_step()
        return self._results(jobs)

    def _count(self, crew: Crew) -> None:
        self.counts.handoffs += crew.baton.handoffs
        crew.baton.handoffs = 0
        merge_sm_use(self.counts.sm_users, *(context.sm_users for context in crew.contexts))

    def close(self) -> None:
        """Stop the threads. A later step makes new ones."""
        if self._closer is not None:
            self._closer()
        self._crew = self._closer = None

    def _crew_for_a_step(self) -> Crew:
        """The crew, marked as in a step; a new one in a forked child, or if Ctrl-C interrupted the last step."""
        if self._crew is not None and (self._crew.in_step or self._crew.pid != os.getpid()):
            self._discard()
        if self._crew is None:
            ready, done = Gate(self.lanes), Gate(self.lanes)
            stream, unset = self._streams.current(), [None] * self.lanes
            contexts = make_ubatch_contexts(self.lanes, stream, self._comm_stream, unset, ready, streams=self._streams)
            workers = [Worker(f"ubatch-lane-{lane}", done) for lane in range(self.lanes)]
            core = CoreOfSteps() if self._on_one_core else None
            self._crew = Crew(contexts, ready, done, workers, LanePool.run.__code__, core)
            self._closer = weakref.finalize(self, self._crew.dismiss)
            for worker in workers:
                try:
                    worker.thread.start()
                except RuntimeError as error:  # the process has reached its limit of threads
                    self._discard()
                    raise UBatchError(
                        f"thread {worker.name!r} could not be started: {error}. Nothing ran. Allow this process more "
                        "threads (ulimit -u, the container's pids limit), or end some."
                    ) from error
                self.counts.threads_started += 1
        self._crew.thread = threading.get_ident()
        self._crew.in_step = True
        return self._crew

    def _discard(self) -> None:
        """Drop the crew without waiting for its threads: they hang, unwind, or belong to the parent process."""
        if self._crew is not None:
            self._crew.discard()
            self._count(self._crew)
        if self._closer is not None:
            self._closer.detach()
        self._crew = self._closer = None

    def _watch(self, crew: Crew, jobs: Sequence[Job], capture: Capture | None) -> bool:
        """Start the lanes, give the baton to lane 0 when all are ready, and wait until the step has ended.

        Returns whether every lane started and ended, with or without an error.
        """
        baton = crew.baton
        given: list[Job] = []
        try:
            for worker, job in zip(crew.workers, jobs, strict=True):
                worker.give(job)
                given.append(job)
            all_ready = self._await_ready(crew, jobs)
            if capture is not None and all_ready:
                capture.begin()
            baton.start()
            while not crew.done.wait_for(min(_LOOK_UP_S, self.timeout_s)):
                beat()
                self._check_hang(crew)
        except BaseException as error:  # a hang, or Ctrl-C in the calling thread
            if baton.running and isinstance(error, UBatchTimeout):
                baton.abandon(baton.statistics().holder)
            else:
                baton.stop()
            self._unwind(crew, given)
            raise
        return all_ready

    def _await_ready(self, crew: Crew, jobs: Sequence[Job]) -> bool:
        """Wait until all lanes are parked and warm; False if a lane could not enter and has ended with an error."""
        begun = time.monotonic()
        while not crew.ready.wait_for(min(_LOOK_UP_S, self.timeout_s)):
            beat()
            stillborn = [job.context.id for job in jobs if job.ended]
            for lane in stillborn:
                crew.baton.abandon(lane)
            if stillborn:
                return False
            if time.monotonic() - begun > self.timeout_s and not crew.patient:
                raise UBatchTimeout(f"lanes were not ready within {self.timeout_s} s.\n{report(crew.contexts)}")
        return True

    def _check_hang(self, crew: Crew) -> None:
        state = crew.baton.statistics()
        if state.holder < 0 or crew.patient or state.held_s <= self.timeout_s:
            return
        holder = crew.contexts[state.holder]
        if time.monotonic() < holder.waits_until:  # the wait has its own time-out, whose error names the peer
            return
        if crew.baton.statistics().held_s <= self.timeout_s:  # the wait has just ended, or the lane has handed on
            return
        raise UBatchTimeout(
            f"lane {holder.id} held the baton for {state.held_s:.1f} s (timeout_s = {self.timeout_s}); last point "
            f"{holder.last_point!r}. What this step wrote is invalid.\n{report(crew.contexts)}"
        )

    def _unwind(self, crew: Crew, jobs: Sequence[Job]) -> None:
        """Give aborted lanes a short time to end."""
        baton = crew.baton
        deadline = time.monotonic() + min(UNWIND_S, self.timeout_s)
        while time.monotonic() < deadline and not all(job.ended or baton.abandoned(job.context.id) for job in jobs):
            crew.done.wait_for(0.02)

    def _results(self, jobs: Sequence[Job]) -> list[Any]:
        failed = [job for job in jobs if job.error is not None]
        if not failed:
            return [job.result for job in jobs]
        first = jobs[0].context.baton.aborted_by
        culprit = next((job for job in failed if job.context.id == first), failed[0])
        error = culprit.error
        if error is None or isinstance(error, LaneAborted):
            raise UBatchError("a lane was aborted, but none reported why. Please report this.")
        note_lane(error, culprit.context, len(jobs))
        self.failure = culprit.context.id, str(culprit.context.last_point)
        for job in failed:
            if job is not culprit and job.error is not None and not isinstance(job.error, LaneAborted):
                note(error, f"lane {job.context.id} also raised {describe(job.error)} while it unwound")
        for job in jobs:
            job.forget()
        try:
            raise error
        finally:
            del error, culprit, failed  # else the traceback would keep itself alive


class SingleLane:
    """Runs a batch as the only lane, in the caller's thread, with the interface of `LanePool`: single-batch overlap.

    An unsplit batch has no other lane, but can compute one chunk of experts while another chunk's transfer is in
    flight. Its transfers need a lane's context: the communication stream, events, buffers kept alive, a trace. So the
    batch runs as lane 0 of 1. Its points hand nothing on; they only run the receive hook that is due. There are no
    threads and no barrier.

    There is no hang check: if the module hangs, the call hangs. Transfers keep their own time-outs; a transfer without
    one ends within `timeout_s`.

    Args:
        timeout_s: the longest wait for a transfer that has no time-out of its own; None waits for ever.

    Attributes:
        counts: what it has done so far.
        failure: lane 0 and the last point it had passed, if the last step failed; else None.
    """

    lanes = 1

    def __init__(
        self, device: torch.device, streams: StreamBackend | None = None, timeout_s: float | None = None
    ) -> None:
        self.timeout_s = timeout_s
        self.failure: tuple[int, str] | None = None
        self._streams = streams if streams is not None else make_streams(device)
        self._comm_stream = self._streams.new_stream()
        self._context: UBatchContext | None = None
        self._in_step = False
        self.counts = PoolCounts()

    def run(
        self,
        bodies: Sequence[Callable[[], Any]],
        schedule: Schedule,
        forward_contexts: Sequence[ForwardContext | None],
        voted_ranks: frozenset[int] = frozenset(),
        capture: Capture | None = None,
        *,
        patient: bool = False,
    ) -> list[Any]:
        """Run the one body in this thread. See `LanePool.run`.

        Raises:
            ConfigError: not one body and one forward context, or a schedule for several lanes.
        """
        if len(bodies) != 1 or len(forward_contexts) != 1 or schedule.lanes != 1:
            raise ConfigError(
                f"one lane runs one batch under a schedule for one, not {len(bodies)} under {schedule.name!r} for "
                f"{schedule.lanes}."
            )
        self.failure = None
        self.counts.steps += 1
        if self._in_step:
            self._discard()
        stream = self._streams.current()
        if self._context is None:
            nobody_waits = Gate(0)  # the caller's device context is already warm
            self._context = UBatchContext(0, Baton(1), nobody_waits, self._streams, stream, self._comm_stream, None)
        context = self._context
        self._in_step = True
        context.baton.prepare(schedule.lead)
        context.baton.start()
        budget = share_out_sms(schedule.comm_sms, self._streams)
        context.begin_step(forward_contexts[0], schedule, voted_ranks, stream, budget)
        part: AbstractContextManager[None] = nullcontext()
        if capture is not None:
            capture.begin()
            part = capture.part()
        try:
            with part, context, transfers_end_within(None if patient or capture is not None else self.timeout_s):
                result = bodies[0]()
        except BaseException as error:
            self.failure = 0, str(context.last_point)
            note_lane(error, context, 1)
            self._streams.set_current(stream)  # Ctrl-C may have interrupted the lane's exit
            self._discard()
            raise
        merge_sm_use(self.counts.sm_users, context.sm_users)
        abandon_transfers(context.settle())
        self._in_step = False
        return [result]

    def close(self) -> None:
        """Do nothing: there is no thread to stop."""

    def _discard(self) -> None:
        """Drop a context that failed, was interrupted or forked. Its transfers' buffers stay alive as long as
        needed."""
        if self._context is not None and not self._context.baton.forked:
            self._context.baton.discard()
            merge_sm_use(self.counts.sm_users, self._context.sm_users)
            abandon_transfers(self._context.settle())
        self._context = None
