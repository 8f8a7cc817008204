"""A lane's context: what it is, how it is entered and left, and what happens at a point.

Contract:
    with context:            parks at the ready barrier, then until the baton comes for the first time
        ...                  exactly one lane is in here at a time
        dbo_yield(point)     hands the baton on; raises LaneAborted when another lane failed
    on leaving               runs the pending hook, makes the compute stream wait for the communication stream,
                                 leaves the ring and hands on; on an error it first marks the baton aborted
    meanwhile                its ledger keeps alive what the communication stream uses (`ubatch.streams.lane_streams`)

What a lane does with its streams is in `ubatch.streams.lane_streams`, what it records in `ubatch.trace.recorder`.
This module holds the lane's state and calls the others in order.

A point, in pseudo-code:
    note the point (for traces and hang reports)
    if the schedule hands on here and another lane is alive: hand on, park until the baton is back
    if this lane's receive hook is still pending: run it

Model code calls the functions of `ubatch.dbo`, which find the context of the lane they run in.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from threading import get_ident
from typing import Any, Protocol

from ubatch.errors import ConfigError, ForkedLaneError, LaneAborted, UBatchError, UnvotedCollectiveError, describe, note
from ubatch.lanes.baton import Baton
from ubatch.process.interrupts import changing
from ubatch.schedules.forward_context import ForwardContext, _forward_context
from ubatch.schedules.schedule import SERIAL, Recv, Schedule, get_schedule
from ubatch.streams.lane_streams import LaneStreams, Launched
from ubatch.streams.streams import NullStreams, SMBudget, StreamBackend
from ubatch.trace.recorder import LaneRecorder, make_recorder
from ubatch.trace.spans import LinkTime, Trace, current_trace

Hook = Callable[[], object]


class ReadyBarrier(Protocol):
    """Where lanes report that they are parked and warm (`ubatch.lanes.wakeup.Gate`)."""

    def arrive(self) -> None:
        """One lane is ready."""


class UBatchContext(LaneStreams):
    """One lane: its id, streams, events, forward context and pending hook. Built by `make_ubatch_contexts` only.

    Attributes:
        id: the lane's number, 0 first.
        forward_context: what `get_forward_context()` returns inside the lane; set per step.
        schedule: the step's schedule; set per step.
        voted_ranks: global ranks that agreed to this split; collectives over others are refused. Set per step.
        trace: where to record spans, or None. Set per step.
        last_point, points_passed: for notes and hang reports.
        waiting: name of what the lane waits for now, such as a transfer; None if it does not wait.
        waits_until: latest end of that wait (`time.monotonic`); until then the hang check leaves the lane alone. 0 if
            the wait has no time-out of its own.
        at_point: gets every point that the lane has passed, and its layer; None if nobody listens.
        at_handover: runs before the lane hands over at an active point, or None. Set by the lane's body.
        ledger: transfers not yet waited for, and what the communication stream still uses.
        sm_budget: how the device's SMs are shared out, or None. Set per step.
        sm_users: name -> whether that kernel or back end keeps to the budget (`report_sm_use`).
    """

    def __init__(
        self,
        lane: int,
        baton: Baton,
        ready: ReadyBarrier,
        streams: StreamBackend,
        compute_stream: Any,
        comm_stream: Any,
        forward_context: ForwardContext | None,
    ) -> None:
        super().__init__(streams, compute_stream, comm_stream)
        self.id = lane
        self.baton = baton
        self.forward_context = forward_context
        self.schedule = SERIAL
        self.voted_ranks: frozenset[int] = frozenset()
        self.trace: Trace | None = None
        self.sm_budget: SMBudget | None = None
        self.sm_users: dict[str, bool] = {}
        self.peers: Sequence[UBatchContext] = (self,)
        self._ready = ready
        self._tokens: tuple[Token[Any], Token[Any]] | None = None
        self._reset()

    def _reset(self) -> None:
        self.thread = 0
        self.last_point = "start"
        self.points_passed = 0
        self.waiting: str | None = None
        self.waits_until = 0.0
        self.at_point: Callable[[str, str], None] | None = None
        self.at_handover: Callable[[], None] | None = None
        self._hook: tuple[Hook, bool] | None = None
        self._recorder: LaneRecorder | None = None
        self._launches = 0
        self.begin_streams()

    def __enter__(self) -> UBatchContext:
        outer = _lane.get()
        if outer is not None:
            raise UBatchError(f"lane {self.id} was entered from inside lane {outer.id}.")
        self._reset()
        self.thread = get_ident()
        self._streams.warm_up()
        self._streams.set_current(self.compute_stream)
        self._tokens = (_lane.set(self), _forward_context.set(self.forward_context))
        try:
            self._ready.arrive()
            self.baton.acquire(self.id)
        except BaseException as error:
            if not isinstance(error, Exception | LaneAborted):  # Ctrl-C, if the main thread runs this lane
                self.baton.interrupted(self.id)
            self._leave()
            raise
        self._recorder = make_recorder(self.id, self.trace)
        if self._recorder is not None:
            self._recorder.begin()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        try:
            try:
                if error is None:
                    self._check_alive()
                    while self._hook is not None:  # a hook may register another one
                        self._run_hook_of(self)
            finally:
                if not self.baton.abandoned(self.id):  # else the caller has done it, and may run another step already
                    # Join only this lane's transfers: those of other lanes may still travel while their lanes compute.
                    self.rejoin(failed=error is not None)
        except BaseException as late:
            if error is None:
                self.baton.abort(self.id)
                raise
            note(error, f"leaving lane {self.id} failed too: {describe(late)}")
        finally:
            if error is not None and not isinstance(error, LaneAborted):
                self.baton.abort(self.id)
            if self._recorder is not None:
                self._recorder.end(failed=self.baton.aborted_by is not None)
            self._leave()

    def _leave(self) -> None:
        if self._tokens is not None:
            _lane.reset(self._tokens[0])
            _forward_context.reset(self._tokens[1])
            self._tokens = None
        self.baton.leave(self.id)

    def begin_step(
        self,
        forward_context: ForwardContext | None,
        schedule: Schedule,
        voted_ranks: frozenset[int],
        compute_stream: Any,
        sm_budget: SMBudget | None,
    ) -> None:
        """Set the step's state before the lane is entered. Called by the caller's thread, whose trace is recorded
        to."""
        self.forward_context = forward_context
        self.schedule = schedule
        self.voted_ranks = voted_ranks
        self.compute_stream = compute_stream
        self.sm_budget = sm_budget
        self.trace = current_trace()

    def settle(self) -> set[Launched]:
        """Drop the state of a finished step. Called by the caller's thread.

        Returns the transfers that were not waited for and whose buffers the transport may still use.
        """
        self.forward_context = self.trace = self.at_handover = self._hook = self._recorder = None
        return self.end_streams(hung=self.baton.abandoned(self.id))

    def _check_alive(self) -> None:
        if get_ident() != self.thread:
            raise UBatchError(
                f"lane {self.id} reached a point from another thread. Points must be passed by the lane's own thread."
            )
        if self.baton.forked:
            raise ForkedLaneError(f"lane {self.id} was forked; the child has no other lane. Exit, or call unsplit.")
        self.baton.check(self.id)

    def pass_point(self, point: str, layer: str = "") -> None:
        """Pass `point`; see the module's pseudo-code. `layer` is only recorded."""
        baton = self.baton
        if baton.in_trouble or get_ident() != self.thread:
            self._check_alive()
        self.last_point = point
        self.points_passed += 1
        active, recorder = point not in self.schedule.points_off, self._recorder
        if recorder is not None:
            recorder.reach(point, active=active, layer=layer)
        if active:
            if self.at_handover is not None:
                self.at_handover()
            baton.pass_on(self.id)
        else:
            baton.since = time.monotonic()
        if recorder is not None:
            recorder.go_on(point, active=active, layer=layer)
        if self._hook is not None:
            self._run_hook_of(self)
        if self.at_point is not None:
            self.at_point(point, layer)

    def register_hook(self, hook: Hook, *, joins: bool = True) -> None:
        """Register `hook`, to run when the transfer's result is needed; see `Recv` and `dbo_register_recv_hook`."""
        if self.baton.in_trouble or get_ident() != self.thread:
            self._check_alive()
        if self._hook is not None:
            raise UBatchError(
                f"lane {self.id} registered a receive hook while its previous one is pending. "
                "Pass a point between two launches."
            )
        self._hook = hook, joins or self.on_comm

    def maybe_run_hook(self) -> None:
        """Run the hook that is due before this lane's next launch."""
        if self.baton.in_trouble or get_ident() != self.thread:
            self._check_alive()
        owner = self if self.schedule.recv is Recv.OWNER else self.peers[self.baton.previous(self.id)]
        if owner._hook is not None:
            self._run_hook_of(owner)

    def _run_hook_of(self, owner: UBatchContext) -> None:
        """Run the receive hook of lane `owner`, which is pending, on this lane's compute stream. A hook that joins
        first makes that stream wait for all of the owner's work on the communication stream."""
        if owner._hook is None:
            return
        (hook, joins), owner._hook = owner._hook, None
        was_on_comm = self.on_comm
        if was_on_comm:
            self.leave_comm()
        if joins and owner.asynchronous:
            if owner.on_comm:
                owner.mark_comm()
            owner.join_comm()
        try:
            hook()
        except Exception as error:
            note(error, f"in the receive hook of lane {owner.id}, run by lane {self.id}")
            raise
        if was_on_comm:
            self.enter_comm()

    def mark_compute(self) -> bool:
        """Record an event on the compute stream, *before* a hand-off, so that it does not cover the next lane's work.

        Returns whether the event is enough: not if a receive hook is pending, because the hook's work comes after the
        event.
        """
        self._compute_done.record(self.compute_stream)
        return self._hook is None

    def note_launch(self, name: str) -> str:
        """Note that the lane launches a transfer; returns its key, unique in this lane and step."""
        key = f"{name}.{self._launches}"
        self._launches += 1
        if self._recorder is not None:
            self._recorder.launch(key)
        return key

    def begin_wait(self, name: str, until: float) -> None:
        """Note that the lane starts to wait for transfer `name`. The wait times out at `until`; 0: it has no
        time-out."""
        self.waiting, self.waits_until = name, until
        if self._recorder is not None:
            self._recorder.begin_wait()

    def end_wait(self, name: str, key: str, link: LinkTime, launcher: UBatchContext | None) -> None:
        """Note that the wait is over. `link`: how long the transfer, launched by lane `launcher`, occupied the link.

        The event is recorded for the launcher, even if another lane ran its receive hook.
        """
        self.waiting, self.waits_until = None, 0.0
        self.baton.since = now = time.monotonic()
        if self._recorder is not None:
            self._recorder.end_wait(name, key, link, None if launcher is None else launcher.id, now)


_lane: ContextVar[UBatchContext | None] = ContextVar("ubatch_lane", default=None)


def make_ubatch_contexts(
    num_ubatches: int,
    compute_stream: Any,
    comm_stream: Any,
    forward_contexts: Sequence[ForwardContext | None],
    ready_barrier: ReadyBarrier,
    *,
    schedule: Schedule | str = "mlp_shared_overlap",
    streams: StreamBackend | None = None,
) -> list[UBatchContext]:
    """The contexts of `num_ubatches` lanes that share one baton.

    Args:
        compute_stream, comm_stream: shared by all lanes.
        forward_contexts: one per lane.
        ready_barrier: every lane reports here when it is parked and warm; then `start` the baton
            (`contexts[0].baton.start()`).
        schedule: its lead, active points and receive order hold for all lanes.
        streams: where events come from; a CPU's null objects by default.

    Raises:
        ConfigError: fewer than two lanes, or not one forward context per lane.
    """
    if num_ubatches < 2:
        raise ConfigError(f"num_ubatches must be at least 2, not {num_ubatches}. Call the model itself for one batch.")
    if len(forward_contexts) != num_ubatches:
        raise ConfigError(f"{num_ubatches} lanes need as many forward contexts, not {len(forward_contexts)}.")
    chosen = get_schedule(schedule) if isinstance(schedule, str) else schedule
    backend = streams if streams is not None else NullStreams()
    baton = Baton(num_ubatches)
    baton.prepare(chosen.lead)
    contexts = [
        UBatchContext(lane, baton, ready_barrier, backend, compute_stream, comm_stream, forward_contexts[lane])
        for lane in range(num_ubatches)
    ]
    for context in contexts:
        context.peers = contexts
        context.schedule = chosen
    return contexts


current_lane = _lane.get
"""Returns the context of the lane this code runs in, or None."""


def leave_lane() -> None:
    """Be in no lane from here on, in this context (`contextvars`)."""
    _lane.set(None)


def current_schedule() -> Schedule:
    """The lane's schedule; `serial` outside a lane."""
    lane = _lane.get()
    return SERIAL if lane is None else lane.schedule


def check_voted(lane: UBatchContext, ranks: Sequence[int], what: str) -> None:
    """Refuse communication in a lane that could dead-lock.

    Raises:
        UnvotedCollectiveError: `what` is over several ranks, and they did not all vote on the lane's split.
    """
    if len(ranks) > 1 and not lane.voted_ranks.issuperset(ranks):
        raise UnvotedCollectiveError(
            f"{what} over ranks {list(ranks)} in lane {lane.id}, but they did not vote on this split, so they could "
            "dead-lock. Set UBatchConfig.group to a CommGroup of all these ranks."
        )


class transfers_end_within(changing["weakref.ref[transfers_end_within] | None"]):  # noqa: N801 - as `changing`
    """In the `with` block, a wait for a transfer without a connection raises `TransferTimeout` after `seconds`.

    For code outside lanes, where no hang check runs. A work that ignores the time-out passed to it cannot be ended. The
    limit ends with the block, even if Ctrl-C interrupted that.

    Args:
        seconds: None waits for ever.
    """

    def __init__(self, seconds: float | None) -> None:
        super().__init__(_transfer_limit, weakref.ref(self))
        self.seconds = seconds


_transfer_limit: ContextVar[weakref.ref[transfers_end_within] | None] = ContextVar(
    "ubatch_transfer_limit", default=None
)


def transfer_limit_s() -> float | None:
    """Seconds that a wait may take if no lane and no connection ends it; None: no limit."""
    reference = _transfer_limit.get()
    limit = None if reference is None else reference()
    return None if limit is None else limit.seconds
