"""The baton: makes sure that exactly one lane runs.

`Ring` decides which lane is next; this class hands over to it, with one private wake-up per lane. So no lane polls, and
a hand-off involves two threads only:

    pass_on(lane):   following = ring.at_point(lane)
                     wake[following]; sleep on wake[lane]; on return, was the step aborted?

Aborting keeps the invariant. A lane that fails marks the baton aborted and hands it on as usual; each other lane wakes
in ring order, finds the mark, unwinds alone and hands on. So clean-up code never runs in two lanes at once either. Only
`abandon`, for a lane that hangs, takes the baton from its holder; the lock protects that. After an interrupt of the
caller, the whole baton is given up (`stop`, `discard`).
"""

import os
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass

from ubatch.errors import LaneAborted, UBatchError
from ubatch.lanes.one_core import OneCore
from ubatch.lanes.wakeup import WakeUp, make_wakeup
from ubatch.schedules.ring import Ring

_LOCK_S = 0.1
"""Seconds. A lane holds the lock for microseconds; a thread that holds it longer was interrupted and will not release
it."""


@dataclass(frozen=True)
class BatonStatistics:
    """A frozen view of a baton, cheap enough for a hang report.

    Attributes:
        holder: the lane that may run, -1 before the start and after the end.
        handoffs: switches from one lane to another since the baton was made.
        held_s: seconds since the last hand-off.
        alive: per lane, whether it is still in the ring.
        aborted: whether a lane failed.
    """

    holder: int
    handoffs: int
    held_s: float
    alive: tuple[bool, ...]
    aborted: bool


class Baton:
    """The right to run, for a ring of `lanes` lanes."""

    def __init__(self, lanes: int) -> None:
        self._ring = Ring(lanes)
        self._wake: list[WakeUp] = [make_wakeup() for _ in range(lanes)]
        # A single lane runs in the caller's thread, and Ctrl-C may leave the lock held.
        self._lock = threading.Lock() if lanes > 1 else threading.RLock()
        self.core: OneCore | None = None  # that the step's lanes share
        self._abandoned: set[int] = set()
        self.handoffs = 0
        self.since = time.monotonic()
        self.aborted_by: int | None = None
        self.forked = False
        self.in_trouble = False  # aborted or forked: what lanes look at first
        self.running = False
        _batons.add(self)

    def prepare(self, lead: int) -> None:
        """Prepare for a step in which lane 0 leads by `lead` points."""
        self._ring.reset(lead)
        self.aborted_by = None
        self.in_trouble = self.forked

    def start(self) -> None:
        """Give the baton to lane 0. Every lane must be parked in `acquire` or on its way there."""
        self.since = time.monotonic()
        self.running = True
        self._wake[self._ring.holder].set()

    def acquire(self, lane: int) -> None:
        """Park until the baton comes to `lane` for the first time."""
        if self.core is not None:
            self.core.bind()
        self._wake[lane].wait()
        self.check(lane)

    def pass_on(self, lane: int) -> bool:
        """Pass an active point: hand on and park until the baton is back. False if `lane` kept it.

        Raises:
            LaneAborted: another lane failed.
        """
        ring = self._ring
        with self._lock:
            if self.aborted_by is not None or ring.holder != lane:
                self.check(lane)
            following = ring.at_point(lane)
            self.since = time.monotonic()
            if following == lane:
                return False
            self.handoffs += 1
        woken = False
        try:
            self._wake[following].set()
            woken = True
            self._wake[lane].wait()
        except BaseException:  # Ctrl-C, where the main thread runs a lane
            if not woken:
                self._wake[following].set()
            self.interrupted(lane)
            raise
        if self.aborted_by is not None or ring.holder != lane:
            self.check(lane)
        return True

    def leave(self, lane: int) -> None:
        """`lane` ends: take it out of the ring and hand on, unless the baton was taken from it."""
        if self.core is not None:
            self.core.free()
        if self.forked:  # the child has no other lanes, and the lock may have been held at the fork
            return
        with self._lock:
            if self._ring.holder == lane:
                self._hand_on_from(lane)

    def abort(self, lane: int) -> None:
        """`lane` failed: every other lane raises `LaneAborted` when the baton reaches it."""
        if self.aborted_by is None:
            self.aborted_by = lane
            self.in_trouble = True

    def abandon(self, lane: int) -> None:
        """Take the baton from a lane that hangs. Its thread must never run for this baton again."""
        with self._lock:
            self.abort(lane)
            self._abandoned.add(lane)
            if self._ring.holder == lane:
                self._hand_on_from(lane)

    def stop(self) -> None:
        """The caller gives up the step: every lane unwinds in ring order, or at once if none has begun."""
        self.abort(self._ring.lanes)
        holder = self._ring.holder
        for wakeup in self._wake[holder : holder + 1] if self.running else self._wake:
            wakeup.set()

    def discard(self) -> None:
        """This baton is no longer used: every lane that is still parked wakes and unwinds.

        May be called in any state, also with the lock held, and more than once.
        """
        self.abort(self._ring.lanes)
        self._abandoned.update(lane for lane, alive in enumerate(self._ring.alive) if alive)
        self._lock.acquire(timeout=_LOCK_S)
        with suppress(RuntimeError):  # the lock of a single lane, whose thread has ended
            self._lock.release()
        for wakeup in self._wake:
            wakeup.set()

    def abandoned(self, lane: int) -> bool:
        """Whether the baton was taken from `lane` for good."""
        return lane in self._abandoned

    def previous(self, lane: int) -> int:
        """The lane before `lane` in the ring; `lane` itself if it is the only one left."""
        alive, lanes = self._ring.alive, self._ring.lanes
        return next((other % lanes for other in range(lane - 1, lane - lanes, -1) if alive[other % lanes]), lane)

    def check(self, lane: int) -> None:
        """Raise if `lane` may not go on.

        Raises:
            LaneAborted: another lane failed, or this one was abandoned.
            UBatchError: `lane` does not hold the baton.
        """
        if self.aborted_by is not None and (self.aborted_by != lane or lane in self._abandoned):
            raise LaneAborted(f"lane {lane} unwinds because lane {self.aborted_by} failed")
        if self._ring.holder != lane:
            raise UBatchError(f"lane {lane} runs, but lane {self._ring.holder} holds the baton.")

    def statistics(self) -> BatonStatistics:
        """Who holds the baton, for how long, and how often it changed hands."""
        ring = self._ring
        held = time.monotonic() - self.since
        return BatonStatistics(ring.holder, self.handoffs, held, tuple(ring.alive), self.aborted_by is not None)

    def interrupted(self, lane: int) -> None:
        """Ctrl-C arrived while the main thread was parked as a lane: it unwinds like any failed lane, on its turn."""
        self.abort(lane)
        if self._ring.holder != lane:
            self._wake[lane].wait()

    def _hand_on_from(self, lane: int) -> None:
        following = self._ring.at_end(lane)
        self.since = time.monotonic()
        if following >= 0:
            self.handoffs += 1
            self._wake[following].set()
        else:
            self.running = False


_batons: weakref.WeakSet[Baton] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for baton in list(_batons):
        baton.forked = baton.running
        baton.in_trouble |= baton.running
        if baton.running and baton.core is not None:  # a lane forked
            baton.core.free()


os.register_at_fork(after_in_child=_after_fork_in_child)
