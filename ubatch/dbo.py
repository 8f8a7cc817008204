"""What model code calls inside a lane. Outside a lane all of it returns at once: a `ContextVar` that is unset costs
tens of nanoseconds.

Names are vLLM's. Each function looks up the lane it runs in; what happens there is in `ubatch.context`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ubatch.context import _lane

__all__ = [
    "dbo_current_ubatch_id",
    "dbo_enabled",
    "dbo_maybe_run_recv_hook",
    "dbo_register_recv_hook",
    "dbo_switch_to_comm",
    "dbo_switch_to_compute",
    "dbo_yield",
    "dbo_yield_and_switch_from_comm_to_compute",
    "dbo_yield_and_switch_from_compute_to_comm",
    "on_comm_stream",
]

_current_lane = _lane.get


def dbo_yield(point: str = "user") -> None:
    """Pass a point: hand the baton to the next lane if the schedule says so. Does nothing outside a lane.

    Args:
        point: a `Point` of this project, or any name of your own (always active).

    Raises:
        LaneAborted: another lane failed; let it pass.
    """
    lane = _current_lane()
    if lane is not None:
        lane.pass_point(point)


def dbo_register_recv_hook(hook: Callable[[], object]) -> None:
    """Leave `hook` (usually a transfer's `wait`) to be run exactly once, when its result is due.

    By default the lane that registered it runs it when the baton comes back; with `recv="peer"` the next lane runs
    it before its own next launch. Outside a lane it runs at once.
    """
    lane = _current_lane()
    if lane is None:
        hook()
    else:
        lane.register_hook(hook)


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


def dbo_yield_and_switch_from_compute_to_comm(point: str = "user") -> None:
    """Hand on; when the baton is back, continue on the communication stream after *this* lane's compute work."""
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


@contextmanager
def on_comm_stream() -> Iterator[None]:
    """Launch a transfer: on the communication stream inside a lane, in place outside.

    The compute stream does not wait here; `Transfer.wait` joins it. Inside a lane that is on the communication stream
    already, it stays there.
    """
    lane = _current_lane()
    if lane is None:
        yield
        return
    was_on_comm = lane.on_comm
    lane.enter_comm()
    try:
        yield
    finally:
        if not was_on_comm:
            lane.leave_comm()
