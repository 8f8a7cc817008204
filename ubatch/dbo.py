"""What model code calls inside a lane. Outside a lane all of it returns at once: a `ContextVar` that is unset costs
tens of nanoseconds.

Names are vLLM's. Each function looks up the lane it runs in; what happens there is in `ubatch.lanes.context`. Names
of ours are `dbo_keep`, `on_comm_stream`, `on_compute_stream`, `fork_comm_stream` and the two of the SM budget.
What differs:

    dbo_switch_to_comm, dbo_switch_to_compute   order the streams here, as vLLM's `_sync` variants do: tensors shared by
                                                two streams need it. To launch a transfer that compute does not wait
                                                for, use `on_comm_stream`, and wait in a receive hook
    dbo_start                                   does not exist here. Older vLLM ignored points until a lane called it.
                                                Here lanes start together; a schedule's `points_off` names inactive
                                                points
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from ubatch.lanes.context import current_lane as _current_lane
from ubatch.streams.streams import Event, SMBudget, merge_sm_use

P = ParamSpec("P")
T = TypeVar("T")


def dbo_yield(point: str = "user", layer: str = "") -> None:
    """Pass a point: hand the baton to the next lane if the schedule says so. Does nothing outside a lane.

    Args:
        point: a `Point` of this project, or any name of your own (always active).
        layer: the kind of layer that passes it, for traces and the simulator; the order of lanes does not depend on it.

    Raises:
        LaneAborted: another lane failed; do not catch it.
    """
    lane = _current_lane()
    if lane is not None:
        lane.pass_point(point, layer)


def dbo_register_recv_hook(hook: Callable[[], object], *, joins: bool = True) -> None:
    """Register `hook` (usually a transfer's `wait`), which runs exactly once, before its result is needed.

    By default the lane that registered it runs it when the baton comes back; with `recv="peer"` the next lane runs
    it before its own next launch. Outside a lane it runs at once.

    Args:
        hook: called without arguments.
        joins: on CUDA the compute stream first waits for all of the lane's work on the communication stream. False if
            the hook waits for its own transfers and must not wait for later ones.
    """
    lane = _current_lane()
    if lane is None:
        hook()
    else:
        lane.register_hook(hook, joins=joins)


def dbo_maybe_run_recv_hook() -> None:
    """Run the pending receive hook that is due before a launch, if there is one."""
    lane = _current_lane()
    if lane is not None:
        lane.maybe_run_hook()


def dbo_current_ubatch_id() -> int:
    """The number of the lane this code runs in; 0 outside a lane."""
    lane = _current_lane()
    return 0 if lane is None else lane.id


def dbo_enabled() -> bool:
    """Whether this code runs inside a lane."""
    return _current_lane() is not None


def dbo_keep(*tensors: object) -> None:
    """Keep tensors that the communication stream uses alive until the lane's compute stream is ordered after that use.

    For code that switches streams by hand and drops a tensor before it switches back; transfers keep their own
    buffers. See `ubatch.streams.lane_streams`. Does nothing outside a lane.
    """
    lane = _current_lane()
    if lane is not None:
        lane.ledger.keep(tensors)


def dbo_switch_to_comm() -> None:
    """Continue on the communication stream, ordered after the compute stream's work so far."""
    lane = _current_lane()
    if lane is not None:
        lane.enter_comm()


def dbo_switch_to_compute() -> None:
    """Continue on the compute stream, ordered after what this lane put on the communication stream."""
    lane = _current_lane()
    if lane is not None:
        lane.leave_comm()
        lane.join_comm()


dbo_switch_to_comm_sync = dbo_switch_to_comm
"""vLLM's name for the ordered switch. Here every switch is ordered."""
dbo_switch_to_compute_sync = dbo_switch_to_compute
"""The same."""


def dbo_get_previous_event(record: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Call `record(...)` with the lane's compute stream current and return its result: an event of another library,
    such as DeepEP's `buffer.capture()`. Outside a lane nothing is called and the result is None.

    Call it before a hand-off: afterwards the event would cover the other lanes' work, too. It orders nothing by itself,
    and does not cover the work of a receive hook that runs after the hand-off.
    """
    lane = _current_lane()
    return None if lane is None else lane.on_compute(lambda: record(*args, **kwargs))


def dbo_yield_and_switch_from_compute_to_comm(point: str = "user") -> None:
    """Hand on; when the baton is back, continue on the communication stream after *this* lane's compute work.

    Before this call, allocate the tensors that compute will read. Memory allocated after it, on the communication
    stream, may still be in use by the other lanes' compute (`ubatch.streams.lane_streams`).
    """
    lane = _current_lane()
    if lane is not None:
        marked = lane.mark_compute()
        lane.pass_point(point)
        lane.enter_comm(marked=marked)


def dbo_yield_and_switch_from_comm_to_compute(point: str = "user") -> None:
    """Hand on; when the baton is back, continue on the compute stream after this lane's communication."""
    lane = _current_lane()
    if lane is not None:
        lane.leave_comm()
        lane.pass_point(point)
        lane.join_comm()


def fork_comm_stream() -> Event | None:
    """Record an event on the compute stream, for a later `on_comm_stream`; None outside a lane.

    For a transfer that runs in parallel with compute launched before it. Allocate the transfer's output before this
    call: memory freed later may still be in use by that compute (`ubatch.streams.lane_streams`).
    """
    lane = _current_lane()
    return None if lane is None else lane.fork()


@contextmanager
def on_comm_stream(fork: Event | None = None) -> Iterator[None]:
    """Launch a transfer: on the communication stream inside a lane, in place outside.

    The compute stream does not wait here; `Transfer.wait` makes it wait. A lane that is already on the communication
    stream stays there.

    Args:
        fork: from `fork_comm_stream`: the transfer waits for compute launched before the fork, not for later compute.
    """
    lane = _current_lane()
    if lane is None:
        yield
        return
    was_on_comm = lane.on_comm
    lane.enter_comm(fork=fork)
    try:
        yield
    finally:
        if not was_on_comm:
            lane.leave_comm()


@contextmanager
def on_compute_stream() -> Iterator[None]:
    """Run the block on the compute stream, to allocate tensors that a transfer writes and compute reads.

    If the lane was on the communication stream it returns there, ordered after the block. Outside a lane nothing
    changes.
    """
    lane = _current_lane()
    if lane is None or not lane.on_comm:
        yield
        return
    lane.leave_comm()
    try:
        yield
    finally:
        lane.enter_comm()


def current_sm_budget() -> SMBudget | None:
    """The budget of the lane this code runs in; None outside a lane, on a CPU, or where nothing is reserved."""
    lane = _current_lane()
    return None if lane is None else lane.sm_budget


def report_sm_use(user: str, *, obeys: bool) -> None:
    """Say whether a kernel or back end keeps to the budget in force; does nothing where there is none.

    Args:
        user: its name in `statistics().sm_budget`.
        obeys: whether it takes no more SMs than its share. Once False, it stays False there.
    """
    lane = _current_lane()
    if lane is not None and lane.sm_budget is not None:
        merge_sm_use(lane.sm_users, {user: obeys})
