"""Who keeps a tensor alive while a stream still works on it.

The caching allocator gives a freed block back to the stream that it was allocated on, at once: that stream's next
allocation may get it. What other streams still do with it, the allocator does not know. So:

    A tensor may be freed when every use of it on another stream comes before whatever its own stream gets next.

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

What model code that switches streams by hand has to do:

  - allocate on the compute stream what compute will read. What was allocated on the communication stream and is read
    by compute is safe after `dbo_switch_to_comm` and a launch, which fork anew; not after
    `dbo_yield_and_switch_from_compute_to_comm`, whose mark is older than what other lanes have computed since;
  - allocate what a transfer behind `fork_comm_stream` writes before that mark: memory that was freed since then may
    still be in use by compute that the transfer does not wait for;
  - name what it hands to the communication stream: `dbo_keep(x)`, if nothing else holds `x` until the switch back.

Nobody calls `record_stream`: it would delay every reuse by an event query, and in a captured graph forbid it.
A graph's own pool follows the same rule, in the order of capture; nothing here asks an event while one is captured.
Tests hold the code to this with `tests/support/fake_cuda.py`, which sees every operation of the real modules.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable
from typing import Protocol

from ubatch.process.interrupts import holding
from ubatch.streams.graph_protocols import capturing

__all__ = ["Launched", "Ledger", "abandon_transfers"]


class Launched(Protocol):
    """What a lane remembers of its transfers (`ubatch.ranks.transfer.Transfer`)."""

    @property
    def over(self) -> bool:
        """Whether the transport no longer touches the buffers."""

    def follow(self, *, failed: bool) -> bool:
        """Let the current stream come after the transfer without blocking; False where only the host can wait.

        Args:
            failed: its lane failed, so nothing is launched for it any more.
        """


class Ledger:
    """What one lane has under way: its transfers, and what its communication stream still uses.

    Attributes:
        launched: transfers that nobody has waited for.
    """

    def __init__(self) -> None:
        self.launched: set[Launched] = set()
        self._unmarked: list[object] = []
        self._marked: list[tuple[int, list[object]]] = []

    def keep(self, objects: Iterable[object]) -> None:
        """Hold what the communication stream uses since the lane's last mark, until the next one is joined."""
        self._unmarked += objects

    def mark(self, number: int) -> None:
        """The lane marked the communication stream; marks are numbered upwards."""
        if self._unmarked:
            self._marked.append((number, self._unmarked))
            self._unmarked = []

    def join(self, number: int) -> None:
        """The compute stream waits for the lane's mark of that number, and so for those before it."""
        if self._marked:
            self._marked = [later for later in self._marked if later[0] > number]

    def follow_transfers(self, *, failed: bool) -> None:
        """Order the current stream after the transfers that nobody waited for, where a stream can; let those go."""
        for transfer in [each for each in self.launched if each.follow(failed=failed)]:
            self.launched.discard(transfer)

    def settle(self) -> set[Launched]:
        """The lane has ended and its streams are joined. Returns the transfers that the transport still works on."""
        self._unmarked, self._marked = [], []
        launched, self.launched = self.launched, set()
        return launched


_abandoned: list[Launched] = []
_of_the_parent: list[Launched] = []
_abandoned_lock = threading.RLock()


def _after_fork_in_child() -> None:
    global _abandoned_lock
    _abandoned_lock = threading.RLock()  # another thread of the parent may have held it
    _of_the_parent.extend(_abandoned)  # the transport's threads, which end them, live there
    _abandoned.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def abandon_transfers(transfers: Collection[Launched]) -> None:
    """Keep transfers of a failed lane, and so their buffers, until the transport is done with them."""
    if not transfers and not _abandoned:
        return

    def keep() -> None:
        waiting = [*_abandoned, *transfers]
        _abandoned[:] = waiting if capturing() else [transfer for transfer in waiting if not transfer.over]

    holding(_abandoned_lock, keep)
