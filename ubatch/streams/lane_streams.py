"""The two streams as one lane sees them: where it is, what it has marked, what it still has to join.

    enter_comm      fork    the communication stream waits for what compute has so far, or had at an earlier `fork`
    leave_comm      mark    record what the communication stream has so far, and continue on compute
    join_comm       join    the compute stream waits for a mark, and so for all before it

All lanes share the streams; marks are the lane's own, and recorded before the hand-off, so that what other lanes put
on a stream afterwards is not waited for. Marks are numbered: a transfer is joined by its own, so that who waits for the
first of several does not wait for the others. Events are kept, not made per step. `ubatch.streams.lifetimes` has the
other half: which tensors live until which join.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ubatch.streams.lifetimes import Launched, Ledger
from ubatch.streams.streams import Event, NullStreams, StreamBackend

__all__ = ["LaneStreams"]

T = TypeVar("T")


class LaneStreams:
    """One lane's part of the shared streams.

    Attributes:
        compute_stream: the caller's current stream; set per step.
        comm_stream: for communication, the pool's own.
        ledger: transfers not yet waited for, and what the communication stream still uses.
        marked: the number of the last mark.
    """

    def __init__(self, streams: StreamBackend, compute_stream: Any, comm_stream: Any) -> None:
        self.compute_stream = compute_stream
        self.comm_stream = comm_stream
        self.ledger = Ledger()
        self._streams = streams
        self._compute_done = streams.new_event()
        self._copied = streams.new_event()
        self._on_comm = False
        self.marked = 0
        self._unjoined: deque[tuple[int, Event]] = deque()
        self._spare: list[Event] = []

    def begin_streams(self) -> None:
        """The lane starts, on the compute stream, with nothing under way."""
        self._on_comm = False
        self._spare += [event for _, event in self._unjoined]
        self._unjoined.clear()

    def rejoin(self, *, failed: bool) -> None:
        """The lane ends: the compute stream waits for all it launched, also for what nobody waited for."""
        self.leave_comm()
        self.ledger.follow_transfers(failed=failed)
        self.join_comm()

    def end_streams(self, *, hung: bool) -> set[Launched]:
        """The step is over. Returns the transfers that nobody waited for and that their transport may still work on.

        Args:
            hung: the lane could not rejoin; the caller does it in its place.
        """
        if hung and (self._on_comm or self._unjoined):
            with suppress(RuntimeError):  # a device that fails here has said so, and runs nothing more
                self.mark_comm()
                self.join_comm()
        return self.ledger.settle()

    def fork(self) -> Event:
        """Mark what the compute stream has so far, for one `enter_comm`. Unlike the mark before a hand-off it stays as
        it is, whatever the lane launches in between."""
        return self._recorded(self.compute_stream)

    def enter_comm(self, *, marked: bool = False, fork: Event | None = None) -> None:
        """Continue on the communication stream, after what the compute stream has so far.

        Args:
            marked: `mark_compute` was called before a hand-off; what was added since does not count.
            fork: from `fork`; what was added since does not count.
        """
        if self._on_comm:
            return
        if fork is not None:
            fork.wait(self.comm_stream)
            self._spare.append(fork)
        else:
            if not marked:
                self._compute_done.record(self.compute_stream)
            self._compute_done.wait(self.comm_stream)
        self._streams.set_current(self.comm_stream)
        self._on_comm = True

    def leave_comm(self) -> None:
        """Continue on the compute stream without waiting; `join_comm` waits later."""
        if self._on_comm:
            self.mark_comm()
            self._streams.set_current(self.compute_stream)
            self._on_comm = False

    def on_compute(self, record: Callable[[], T]) -> T:
        """What `record` returns, called with the compute stream current. Nothing is marked, and nothing waits."""
        if not self._on_comm:
            return record()
        self._streams.set_current(self.compute_stream)
        try:
            return record()
        finally:
            self._streams.set_current(self.comm_stream)

    def join_comm(self, upto: int | None = None) -> None:
        """Let the compute stream wait for what this lane put on the communication stream, if it has not yet.

        Args:
            upto: the number of the mark that will do; the last one by default.
        """
        number, event = 0, None
        while self._unjoined and (upto is None or self._unjoined[0][0] <= upto):
            number, event = self._unjoined.popleft()
            self._spare.append(event)  # recorded anew, it leaves the waits for its earlier records as they are
        if event is not None:
            event.wait(self.compute_stream)
            self.ledger.join(number)

    def mark_comm(self) -> None:
        """Record the communication stream's work, for `join_comm`."""
        self.marked += 1
        self._unjoined.append((self.marked, self._recorded(self.comm_stream)))
        self.ledger.mark(self.marked)

    def mark_copied(self) -> Event:
        """Record the lane's current stream, for the host. One event does for all copies: later marks cover earlier."""
        self._copied.record(self.comm_stream if self._on_comm else self.compute_stream)
        return self._copied

    def release(self, kept: Sequence[object], mark: int | None) -> None:
        """A transfer of this lane was waited for: let go of its buffers once the compute stream comes after it.

        Args:
            kept: the buffers.
            mark: behind the transfer; None if it was launched before the lane left the communication stream.
        """
        if self._on_comm:
            self.ledger.keep(kept)
        elif self._unjoined and (mark is None or self._unjoined[0][0] <= mark):
            self.ledger.keep(kept)
            self.ledger.mark(self.marked)

    @property
    def on_comm(self) -> bool:
        """Whether the lane's current stream is the communication stream."""
        return self._on_comm

    @property
    def asynchronous(self) -> bool:
        """Whether the device works on while the host goes on; a CPU does not."""
        return not isinstance(self._streams, NullStreams)

    def _recorded(self, stream: Any) -> Event:
        """An event that marks what `stream` has so far."""
        event = self._spare.pop() if self._spare else self._streams.new_event()
        event.record(stream)
        return event
