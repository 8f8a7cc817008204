"""One lane's use of the two streams: its current stream, its marks (events), and the marks still to join.

    enter_comm      fork    the communication stream waits for compute's work so far, or up to an earlier `fork`
    leave_comm      mark    record an event on the communication stream, and continue on compute
    join_comm       join    the compute stream waits for a mark, and so for all work before it

All lanes share the streams. Each lane has its own marks, recorded before the hand-off, so that a lane does not wait for
later work of other lanes. Marks are numbered: each transfer is joined by its own mark, so that waiting for the first of
several does not wait for the others. Events are reused from step to step. `ubatch.streams.lifetimes` describes which
tensors live until which join.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ubatch.streams.lifetimes import Launched, Ledger
from ubatch.streams.streams import Event, NullStreams, StreamBackend

T = TypeVar("T")


class LaneStreams:
    """One lane's view of the shared streams.

    Attributes:
        comm_stream: the pool's stream for communication.
        asynchronous: whether the device works asynchronously to the host; False for a CPU, where a lane stays on the
            compute stream, as there is no other.
        ledger: transfers not yet waited for, and tensors that the communication stream still uses.
        on_comm: whether the lane's current stream is the communication stream.
        marked: the number of the last mark.
    """

    def __init__(self, streams: StreamBackend, compute_stream: Any, comm_stream: Any) -> None:
        self.compute_stream = compute_stream
        self.comm_stream = comm_stream
        self.asynchronous = type(streams) is not NullStreams
        self.ledger = Ledger()
        self._streams = streams
        self._compute_done = streams.new_event()
        self._copied = streams.new_event()
        self.on_comm = False
        self.marked = 0
        self._unjoined: deque[tuple[int, Event]] = deque()
        self._spare: list[Event] = []

    def begin_streams(self) -> None:
        """Start the lane on the compute stream, with no pending work."""
        self.on_comm = False
        self._spare += [event for _, event in self._unjoined]
        self._unjoined.clear()

    def rejoin(self, *, failed: bool) -> None:
        """End the lane: the compute stream waits for all its transfers, also those that were not waited for."""
        self.leave_comm()
        self.ledger.follow_transfers(failed=failed)
        self.join_comm()

    def end_streams(self, *, hung: bool) -> set[Launched]:
        """End the step. Returns transfers that were not waited for and whose buffers the transport may still use.

        Args:
            hung: the lane hangs and cannot rejoin its streams; the caller does it instead.
        """
        if hung and (self.on_comm or self._unjoined):
            with suppress(RuntimeError):  # a failed device has reported its error already, and runs nothing more
                self.mark_comm()
                self.join_comm()
        return self.ledger.settle()

    def fork(self) -> Event:
        """Record an event on the compute stream, for one `enter_comm`. Unlike the mark before a hand-off, it is not
        replaced by later marks."""
        return self._recorded(self.compute_stream)

    def enter_comm(self, *, marked: bool = False, fork: Event | None = None) -> None:
        """Continue on the communication stream, ordered after the compute stream's work so far.

        Args:
            marked: wait for the `mark_compute` before the hand-off, not for later work.
            fork: wait for this event of `fork`, not for later work.
        """
        if self.on_comm or not self.asynchronous:
            return
        if fork is not None:
            fork.wait(self.comm_stream)
            self._spare.append(fork)
        else:
            if not marked:
                self._compute_done.record(self.compute_stream)
            self._compute_done.wait(self.comm_stream)
        self._streams.set_current(self.comm_stream)
        self.on_comm = True

    def leave_comm(self) -> None:
        """Continue on the compute stream without waiting; `join_comm` waits later."""
        if self.on_comm:
            self.mark_comm()
            self._streams.set_current(self.compute_stream)
            self.on_comm = False

    def on_compute(self, record: Callable[[], T]) -> T:
        """Call `record` with the compute stream current and return its result. No mark, no wait."""
        if not self.on_comm:
            return record()
        self._streams.set_current(self.compute_stream)
        try:
            return record()
        finally:
            self._streams.set_current(self.comm_stream)

    def join_comm(self, upto: int | None = None) -> None:
        """Make the compute stream wait for this lane's work on the communication stream, if it has not yet.

        Args:
            upto: number of the mark to wait for; the last one by default.
        """
        number, event = 0, None
        while self._unjoined and (upto is None or self._unjoined[0][0] <= upto):
            number, event = self._unjoined.popleft()
            self._spare.append(event)  # recording it again does not change earlier waits
        if event is not None:
            event.wait(self.compute_stream)
            self.ledger.join(number)

    def mark_comm(self) -> None:
        """Record an event on the communication stream, for `join_comm`."""
        self.marked += 1
        self._unjoined.append((self.marked, self._recorded(self.comm_stream)))
        self.ledger.mark(self.marked)

    def mark_copied(self) -> Event:
        """Record an event on the lane's current stream, for the host. One event serves all copies: a later record
        covers earlier copies."""
        self._copied.record(self.comm_stream if self.on_comm else self.compute_stream)
        return self._copied

    def release(self, kept: Sequence[object], mark: int | None) -> None:
        """After a transfer was waited for: release its buffers when the compute stream is ordered after it.

        Args:
            mark: number of the mark after the transfer; None while the lane is still on the communication stream.
        """
        if self.on_comm:
            self.ledger.keep(kept)
        elif self._unjoined and (mark is None or self._unjoined[0][0] <= mark):
            self.ledger.keep(kept)
            self.ledger.mark(self.marked)

    def _recorded(self, stream: Any) -> Event:
        """An event recorded on `stream` now."""
        event = self._spare.pop() if self._spare else self._streams.new_event()
        event.record(stream)
        return event
