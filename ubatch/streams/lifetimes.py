"""Keeping a tensor alive while a stream still uses it.

The caching allocator gives a freed block back to the stream that it was allocated on, at once: that stream's next
allocation may get it. The allocator does not know which other streams still use it. So:

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
from collections.abc import Collection, Iterable
from typing import Protocol

from ubatch.process.interrupts import holding
from ubatch.streams.graph_protocols import capturing


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
