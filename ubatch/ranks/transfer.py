"""A transfer: communication that was launched and can be waited for.

    launch ---- travels ---- arrives ---- wait() returns the result
                             |            |
                             |            `finish` runs here, once, in the thread that waits
                             the later of: the transport completed, the emulated link's deadline

Every wait has a limit: a connection's time-out; in a lane without a connection, the hang check
(`ubatch.lanes.workers`); elsewhere the surrounding `transfers_end_within`, if there is one.

Buffers stay referenced until the transport is done with them, even if the lane that launched the transfer fails;
`ubatch.streams.lane_streams` has the order of the streams.

On CUDA most transports are *stream-ordered*: waiting for a work only makes the current stream wait, and the host
continues. Then `wait` costs the host no time, and a failed peer is noticed at the next point where the host does wait.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast

from ubatch.errors import TransferTimeout, UBatchError
from ubatch.lanes.context import UBatchContext, current_lane, transfer_limit_s
from ubatch.ranks.connection import Connection, Work
from ubatch.ranks.waits import Arrival, arrivals_now, fill_gap, gap_work
from ubatch.streams.graph_protocols import capturing
from ubatch.streams.lane_streams import abandon_transfers
from ubatch.trace.spans import UNSPLIT, LinkTime, SpanKind, Trace, current_trace

_LATE_S = 1.0
"""Seconds by which a lane may wake up later than planned."""

T = TypeVar("T")
U = TypeVar("U")


class Transfer(Generic[T]):
    """Communication that was launched and can be waited for.

    Attributes:
        name: for traces and errors.
        bytes_sent, bytes_received: bytes to and from other ranks.

    Args:
        name: see above.
        works: the transport's works; empty if nothing is sent.
        finish: makes the result; runs once, after all works are over, in the thread that waits.
        connection: its peers are watched while the host waits.
        stream_ordered: waiting for a work orders the current stream and returns; else it blocks the host.
        wait_launches: waiting for a work launches the receiving kernel, which waits for the peers. A lane that ends
            without waiting still launches it; a failed lane does not.
        keep: every tensor that the works read or write.
        bytes_sent, bytes_received: see above.
    """

    bytes_sent = bytes_received = 0
    _works: tuple[Work, ...] = ()
    _finish: Callable[[], object] | None = None
    _mapped: tuple[Callable[[Any], object], ...] = ()
    _is_ready = False  # complete from the start, and neither waited for nor delayed yet
    _error: BaseException | None = None
    _connection: Connection | None = None
    _longest_s = 0.0  # of a wait, by its own time-out; 0 if it has none
    _stream_ordered = _wait_launches = False
    _keep: tuple[object, ...] = ()
    _launched = _started = _deadline = 0.0
    _link: LinkTime | None = None
    _on_link = True
    _lane: UBatchContext | None = None
    _trace: Trace | None = None
    _arrivals: list[Arrival] | None = None
    _mark: int | None = None

    def __init__(
        self,
        name: str,
        works: Sequence[Work],
        finish: Callable[[], T],
        *,
        connection: Connection | None = None,
        stream_ordered: bool = False,
        wait_launches: bool = False,
        keep: Sequence[object] = (),
        bytes_sent: int = 0,
        bytes_received: int = 0,
    ) -> None:
        self.name = name
        self.bytes_sent = bytes_sent
        self.bytes_received = bytes_received
        self._works = tuple(works)
        self._finish = finish
        self._value: object = None
        self._connection = connection
        if connection is not None and not stream_ordered:
            self._longest_s = connection.longest_wait_s
        self._stream_ordered = stream_ordered
        self._wait_launches = wait_launches
        self._keep = tuple(keep)
        self._launched = self._started = time.monotonic()
        lane = self._lane = current_lane()
        self._trace = current_trace()
        self._key = name
        if lane is not None:
            # The mark after it on the communication stream; None while the lane is still on that stream.
            self._mark = None if lane.on_comm else lane.marked
        if self._works:
            self._arrivals = arrivals_now()  # who wants to know when it arrived
            if lane is not None:
                lane.ledger.launched.add(self)
                self._key = lane.note_launch(name)

    @staticmethod
    def ready(value: U, name: str = "local") -> Transfer[U]:
        """A transfer that is complete from the start, because nothing had to be sent."""
        transfer: Transfer[U] = object.__new__(Transfer)  # neither lane nor trace has to know of it
        transfer.name, transfer._value, transfer._is_ready = name, value, True
        return transfer

    def map(self, then: Callable[[T], U]) -> Transfer[U]:
        """Let `wait` return `then(result)`. `then` runs once, in the thread that waits. Returns this transfer."""
        if self._is_ready:
            self._reopen()
        if self._finish is None:
            raise RuntimeError(f"transfer {self.name!r} was already waited for.")
        self._mapped = (*self._mapped, then)
        return cast("Transfer[U]", self)

    def delay_until(self, deadline: float, *, started: float | None = None, link: LinkTime | None = None) -> None:
        """Deliver no earlier than `deadline` (seconds of `time.monotonic`): an emulated link's arrival time.

        Args:
            deadline: when the last byte arrives.
            started: when the first byte left, for the trace; the launch by default.
            link: how long each direction of the link was occupied; by default both from `started` to `deadline`.
        """
        if self._is_ready:
            self._reopen()
        self._deadline = deadline
        self._started = self._launched if started is None else started
        self._link = link

    def _reopen(self) -> None:
        """Treat a transfer that is complete from the start as any other: something has to happen when it is waited
        for."""
        value, self._is_ready = self._value, False
        self._finish = lambda: value

    def off_link(self) -> Transfer[T]:
        """Mark this as a few bytes for the host, such as counts: they do not queue behind payloads, so traces draw only
        the wait and no link time. Returns this transfer.
        """
        self._on_link = False
        return self

    def done(self) -> bool:
        """Whether it has arrived: `wait` would return at once, and on CUDA neither host nor stream would wait for it.

        Raises:
            UBatchError: a graph is being captured; nothing arrives before a replay.
        """
        if self._finish is None:
            return True
        if self._stream_ordered and capturing():
            raise UBatchError(f"transfer {self.name!r}: it cannot be queried while a graph is captured.")
        return time.monotonic() >= self._deadline and all(work.is_completed() for work in self._works)

    def wait(self) -> T:
        """The result. Waits without using the CPU; a second call returns the same.

        Raises:
            PeerFailed: another rank of the group failed or died.
            GroupBroken: the group broke in another thread, or was reset, since the launch.
            TransferTimeout: it did not arrive within the time-out of the group or of `transfers_end_within`.
        """
        if self._finish is None:
            self._is_ready = False
            if self._error is not None:
                raise self._error
            return cast("T", self._value)
        lane, launcher = (current_lane(), self._lane) if self._works else (None, None)
        start, arrived, link = time.monotonic(), 0.0, LinkTime()
        if lane is not None:
            lane.begin_wait(self.name, start + self._longest_s if self._longest_s else 0.0)
        try:
            work = gap_work()
            if work is not None and self._is_gap(lane):
                fill_gap(work)
            busy_s = 0.0 if self._arrivals is None or lane is not None else time.process_time()
            if self._connection is not None and not self._stream_ordered:
                check = None if lane is None else functools.partial(self._look_up, lane)
                self._connection.wait_for_works(self._works, self.name, check)
            else:
                limit_s = None if self._stream_ordered else transfer_limit_s()
                for each in self._works:
                    _wait(each, self.name, limit_s)
            if self._deadline > start:
                self._wait_for_link(lane)
            arrived = self._deadline or time.monotonic()
            if self._on_link and lane is not None and lane.trace is not None:
                link = self._link or LinkTime(arrived - self._started, arrived - self._started)
            if self._arrivals is not None:
                cpu_s = time.process_time() - busy_s if lane is None else 0.0
                self._arrivals.append(Arrival(self.name, self._launched, start, arrived, cpu_s))
        except Exception as error:  # Ctrl-C or an aborted lane end this wait, not the transfer
            self._settle(error=error)
            raise
        finally:
            if lane is not None:
                lane.end_wait(self.name, self._key, link, launcher)
        if self._trace is not None and self._works:
            self._record(self._trace, start, arrived)
        if launcher is not None and launcher.asynchronous:
            launcher.join_comm(self._mark)  # the mark is the launching lane's, whichever lane waits
        try:
            value = self._finish()
            for then in self._mapped:
                value = then(value)
        except BaseException as error:
            self._settle(error=error)
            raise
        self._settle(value=value)
        return cast("T", value)

    def _is_gap(self, lane: UBatchContext | None) -> bool:
        """Whether a wait that begins in this lane is a gap: the host really waits, and the step goes on."""
        if not self._works or self._stream_ordered or (lane is not None and lane.baton.in_trouble):
            return False
        return not self.done()

    def _wait_for_link(self, lane: UBatchContext | None) -> None:
        """Wait until the emulated link has delivered."""
        remaining = self._deadline - time.monotonic()
        if remaining > 0:
            if lane is not None:
                lane.waits_until = self._deadline + _LATE_S
            time.sleep(remaining)

    def _look_up(self, lane: UBatchContext) -> None:
        """Extend the lane's limit while the connection still waits: a late peer makes the time-out longer."""
        lane.baton.check(lane.id)
        lane.waits_until = time.monotonic() + self._longest_s

    def _record(self, trace: Trace, start: float, arrived: float) -> None:
        lane = self._lane.id if self._lane is not None else UNSPLIT
        if self._on_link:
            size = self.bytes_sent + self.bytes_received
            trace.add(SpanKind.TRANSFER, self.name, lane, self._started, arrived, size)
        if self._lane is None:
            trace.add_wait(self.name, UNSPLIT, start, time.monotonic(), UNSPLIT, self._launched)

    def _settle(self, *, value: object = None, error: BaseException | None = None) -> None:
        self._value, self._error, self._finish, self._mapped = value, error, None, ()
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.ledger.launched.discard(self)
        if lane is not None and lane.asynchronous:
            lane.release(self._keep, self._mark)
        if error is None:
            self._keep = self._works = ()
        elif lane is not None:
            abandon_transfers([self])

    @property
    def over(self) -> bool:
        """Whether the transport no longer touches the buffers, however it ended."""
        return all(work.is_completed() for work in self._works)

    def follow(self, *, failed: bool) -> bool:
        """Order the current stream after the transfer without blocking the host; False if only the host can wait.

        Args:
            failed: whether its lane failed; then no receiving kernel is launched.
        """
        if self._stream_ordered and not (failed and self._wait_launches):
            for work in self._works:
                work.wait()
        return self._stream_ordered


class Queued:
    """A `Work` that ends in stream order: `wait` makes the current stream wait, once, and returns immediately.

    Args:
        order: makes the stream wait: an event's wait, or the launch of the receiving kernel. None for what the lane's
            own communication stream does: the lane joins that stream, also when it fails.
    """

    def __init__(self, order: Callable[[], object] | None = None) -> None:
        self._order = order

    def is_completed(self) -> bool:
        """Always True: launched work needs nothing more from the host."""
        return True

    def wait(self, timeout: object = None) -> bool:
        """Order the current stream after it."""
        order, self._order = self._order, None
        if order is not None:
            order()
        return True


def _wait(work: Work, name: str, limit_s: float | None) -> None:
    """Wait for a work that belongs to no connection.

    Raises:
        TransferTimeout: it is not over within `limit_s`.
        Others: whatever the work raises.
    """
    if limit_s is None:
        work.wait()
        return
    begun = time.monotonic()
    try:
        arrived = work.wait(timedelta(seconds=limit_s)) is not False
    except RuntimeError:
        if not work.is_completed() and time.monotonic() - begun < limit_s:
            raise  # no time-out
        arrived = False
    if arrived:
        return
    if not work.is_completed():
        raise TransferTimeout(
            f"transfer {name!r} did not arrive within {limit_s} s. It belongs to no group, so the cause is unknown. If "
            "it really is that slow, raise timeout_s."
        )
    work.wait()  # returns at once; the work may have completed just after the time-out
