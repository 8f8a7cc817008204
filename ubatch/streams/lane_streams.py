"""One lane's use of the two streams: its current stream, its marks (events), the marks still to join, and the
tensors that are kept alive until then.

    enter_comm      fork    the communication stream waits for compute's work so far, or up to an earlier `fork`
    leave_comm      mark    record an event on the communication stream, and continue on compute
    join_comm       join    the compute stream waits for a mark, and so for all work before it

All lanes share the streams. Each lane has its own marks, recorded before the hand-off, so that a lane does not wait for
later work of other lanes. Marks are numbered: each transfer is joined by its own mark, so that waiting for the first of
several does not wait for the others. Events are reused from step to step.

A tensor is kept alive while a stream still uses it. The caching allocator gives a freed block back to the stream that
it was allocated on, at once: that stream's next allocation may get it. The allocator does not know which other streams
still use it. So:

    A tensor may be freed when every use of it on another stream is ordered before all later work of its own stream.

Two streams are shared by all lanes; a tensor is used across them only around a launch. All cases:

    allocated on  used on   kept by                         freed after
    ------------  --------  ------------------------------  -------------------------------------------------------
    compute       comm      the transfer's `keep`           `wait`, which makes the compute stream wait first
                            the lane's ledger, where `wait` the lane's next join: it has marked the communication
                            or `dbo_keep` runs on the       stream after the use, and the compute stream waits for
                            communication stream            the mark
    compute       comm,     the launcher's ledger           the lane's end, which joins on failure too
                  unwaited
    compute       comm,     the caller                      the caller has joined in the lane's place
                  lane hung
    compute       compute,  nobody                          at once. What is received by a kernel that `wait` launches
                  received                                  (DeepEP's low latency) is not received for a lane that
                  by a hook                                 failed: the kernel would wait for peers that may not send
    comm          comm      nobody                          at once: one stream keeps its order
    comm          compute   nobody                          at once, if the next fork is a fresh one: the communication
                                                            stream waits for all that compute has, then reuses
    host, pinned  copies    PyTorch's pinned allocator      it has an event of its own

Work that a transport runs on a stream of its own (NCCL does) is queued on the communication stream by an event when it
is launched, so that the table holds for it too. A transport that blocks the host instead (gloo) has no streams; its
transfers are kept until the transport says that it is done, also after a lane failed (`abandon_transfers`).

Rules for model code that switches streams by hand:

  - allocate tensors that compute will read on the compute stream. A tensor allocated on the communication stream and
    read by compute is safe after `dbo_switch_to_comm` or a launch, which make a new fork; it is not safe after
    `dbo_yield_and_switch_from_compute_to_comm`, whose mark does not cover what other lanes compute meanwhile;
  - allocate the output of a transfer that uses `fork_comm_stream` before that call: memory freed later may still be in
    use by compute that the transfer does not wait for;
  - call `dbo_keep(x)` for a tensor used on the communication stream, if nothing else holds `x` until the switch back.

`record_stream` is not used: it would delay every reuse by an event query, and prevent reuse in a captured graph. A
graph's own pool follows the same rule, in the order of capture; no event is queried during a capture. Tests check these
rules with `tests/support/fake_cuda.py`, which records every operation of the real modules.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from ubatch.process.interrupts import holding
from ubatch.streams.graph_protocols import capturing
from ubatch.streams.streams import Event, NullStreams, StreamBackend


class Launched(Protocol):
    """The interface of a transfer to its lane (`ubatch.ranks.transfer.Transfer`)."""

    @property
    def over(self) -> bool:
        """Whether the transport no longer touches the buffers."""

    def follow(self, *, failed: bool) -> bool:
        """Order the current stream after the transfer without blocking; False if only the host can wait.

        Args:
            failed: whether its lane failed; then no receiving kernel is launched.
        """


class Ledger:
    """One lane's pending transfers, and the tensors that its communication stream still uses.

    Attributes:
        launched: transfers not yet waited for.
    """

    def __init__(self) -> None:
        self.launched: set[Launched] = set()
        self._unmarked: list[object] = []
        self._marked: list[tuple[int, list[object]]] = []

    def keep(self, objects: Iterable[object]) -> None:
        """Hold objects that the communication stream uses after the lane's last mark, until the next mark is joined."""
        self._unmarked += objects

    def mark(self, number: int) -> None:
        """Note that the lane has recorded mark `number` on the communication stream; numbers increase."""
        if self._unmarked:
            self._marked.append((number, self._unmarked))
            self._unmarked = []

    def join(self, number: int) -> None:
        """Note that the compute stream waits for mark `number`, and so for all earlier ones."""
        if self._marked:
            self._marked = [later for later in self._marked if later[0] > number]

    def follow_transfers(self, *, failed: bool) -> None:
        """Order the current stream after the transfers not waited for, and release those for which that was
        possible."""
        for transfer in [each for each in self.launched if each.follow(failed=failed)]:
            self.launched.discard(transfer)

    def settle(self) -> set[Launched]:
        """After the lane has ended and its streams are joined: returns transfers that the transport still works on."""
        self._unmarked, self._marked = [], []
        launched, self.launched = self.launched, set()
        return launched


_abandoned: list[Launched] = []
_of_the_parent: list[Launched] = []
_abandoned_lock = threading.RLock()


def _after_fork_in_child() -> None:
    global _abandoned_lock
    _abandoned_lock = threading.RLock()  # another thread of the parent process may have held the old lock
    _of_the_parent.extend(_abandoned)  # only the parent has the transport's threads, which complete them
    _abandoned.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def abandon_transfers(transfers: Collection[Launched]) -> None:
    """Keep transfers of a failed lane, and so their buffers, until the transport is done with them."""
    if not transfers and not _abandoned:
        return

    def keep() -> None:
        waiting = [*_abandoned, *transfers]
        _abandoned[:] = waiting if capturing() else [transfer for transfer in waiting if not transfer.over]

    holding(_abandoned_lock, keep)


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
