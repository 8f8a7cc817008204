"""A rank that compiles, tunes or loads tells its peers, which then wait for it longer than `timeout_s`.

Ranks do not compile equally fast: one may find in a cache what another must compile. The message is in the job's
rendezvous store, which every waiting rank reads:

    ubatch/late        number of ranks that are late now; while it is 0, nothing else is read
    ubatch/late/R      "number what": rank R is late, for the number-th time; "" when it is no longer late

Time in which a peer is late does not count towards a time-out, up to `LATE_S` at a time. After that the rank counts as
hung.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from ubatch.process.interrupts import Marks
from ubatch.process.job_store import JobStore, job_store

LATE_S = 900.0
"""Longest time, in seconds, that a rank may be late at once."""
_COUNT = "ubatch/late"


class _Late:
    """Lateness of this process. Blocks may be nested, and several threads may be in one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blocks = Marks()
        self.times = 0
        self.told: tuple[JobStore, str] | None = None


_own = _Late()


@contextmanager
def late(what: str) -> Iterator[None]:
    """Make peers wait for this rank during the `with` block. Does nothing if there are no peers.

    Args:
        what: what this rank is doing, for the peers' messages.
    """
    own = _own
    try:
        with own.blocks.marked():
            with own.lock, suppress(dist.DistError):  # the store is gone: waiting ranks notice that by themselves
                store = _store()
                if own.told is None and store is not None:
                    key = f"{_COUNT}/{dist.get_rank()}"
                    own.times += 1
                    store.set(key, f"{own.times} {what}")
                    store.add(_COUNT, 1)
                    own.told = store, key
            yield
    finally:
        with own.lock, suppress(dist.DistError):
            if not own.blocks and own.told is not None:
                (store, key), own.told = own.told, None
                store.add(_COUNT, -1)
                store.set(key, "")


def late_ranks(ranks: Collection[int] | None) -> dict[int, str]:
    """The late ones of these global ranks (None: all) -> what each is doing. One read of the store if none is late."""
    store = _store()
    if store is None:
        return {}
    said: dict[int, str] = {}
    with suppress(dist.DistError):
        if not store.add(_COUNT, 0):
            return {}
        for rank in range(dist.get_world_size()) if ranks is None else ranks:
            key = f"{_COUNT}/{rank}"
            if store.check([key]) and (what := store.get(key)):
                said[rank] = what
    return said


class Patience:
    """A time-out for waiting on other ranks, starting now.

    Args:
        timeout_s: seconds to wait, not counting time in which one of them is late.
        peers: their global ranks; None for all ranks of the job.
    """

    __slots__ = ("_deadline", "_first_said", "_peers", "_timeout_s")

    def __init__(self, timeout_s: float, peers: Collection[int] | None = None) -> None:
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._peers = peers
        self._first_said: dict[tuple[int, str], float] = {}

    def over(self) -> bool:
        """Whether the time is up. Reads the store, so do not call it in a tight loop."""
        now = time.monotonic()
        for said in late_ranks(self._peers).items():
            if now - self._first_said.setdefault(said, now) < LATE_S:
                self._deadline = now + self._timeout_s
        return now > self._deadline


def _store() -> JobStore | None:
    """The job's store; None if there is no other rank."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return job_store()


def _after_fork_in_child() -> None:
    global _own
    _own = _Late()


os.register_at_fork(after_in_child=_after_fork_in_child)
