"""Watches for failed peers during NCCL transfers, for which no thread waits on the host.

With gloo the lane that waits for a transfer reads the store. With NCCL the host queues more work and finally blocks in
a device synchronisation, which a dead peer would never let end. So one thread per connection watches:

    every `beat_s`      write beat/R, this rank's counter, plus one
                        a peer posted a failure               -> break the connection, abort the communicator
                        a peer's beat has not risen within the time-out   -> the peer is dead; the same

A call that holds the GIL also stops the beat: DeepEP's dispatch waits for its peers with it, for up to 100 s. Such a
call is declared before (`silence`), by `silence/R`: how many seconds longer rank R's beat may stop. The declaration is
withdrawn when no such call was made for some beats, so that many calls in a step cost few accesses to the store.
Time-outs count only time in which this thread could run.

Aborting the communicator ends its kernels, so the host continues, with invalid results; the end of the step, or the
next launch, then raises `GroupBroken`, which names the cause. torch's own watchdog ends the *process* instead; its
time-out is longer, so it acts only if no rank failed and a collective still hangs.

Not yet run on several GPUs: tests drive it over gloo, with a communicator that counts its aborts.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch.distributed as dist

from ubatch.errors import ForgedValue
from ubatch.process.heartbeat import BEATS_ASIDE, SignOfLife, listeners, longest_silence_s
from ubatch.process.job_store import JobStore


class Watched(Protocol):
    """What is told of failed peers: a connection."""

    def adopt_failure(self) -> bool:
        """Handle a failure that a peer has reported; whether there was one."""

    def lost(self, rank: int) -> None:
        """Handle a rank whose beat has stopped; -1: the store itself is gone."""

    def fail(self, what: str) -> None:
        """Handle a forged value in the store."""


class PeerWatch(SignOfLife):
    """A thread that watches until the connection is broken, stopped or deleted.

    Args:
        patience_s: seconds that a peer's beat may stop before it counts as dead.
        watched: is told; a `weakref.proxy`, so that the thread does not keep it.
        beat_s: seconds between two beats.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], store: JobStore, patience_s: float, watched: Watched, beat_s: float
    ) -> None:
        super().__init__(beat_s)
        self._own, self._silence, self._store = f"beat/{rank}", f"silence/{rank}", store
        self._peers = [each for each in ranks if each != rank]
        self._patience_s = patience_s
        self._watched = watched
        self._stop = threading.Event()
        self._looked_s = 0.0  # total running time of this thread; the times below use this clock
        self._beats = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._thread = threading.Thread(target=self._look, name="ubatch-peer-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        listeners.add(self)
        self.tell_silence(longest_silence_s())
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; returns at once."""
        self._stop.set()
        listeners.discard(self)

    def _announce(self, silence_s: float) -> None:
        with suppress(dist.DistError):  # the store is gone: the thread notices
            self._store.set(self._silence, str(silence_s))
            self._silence_s = silence_s

    def _look(self) -> None:
        with suppress(ReferenceError):  # the connection was deleted
            self._look_until_broken()

    def _look_until_broken(self) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            try:
                self._beats += 1
                self._store.set(self._own, str(self._beats))
                with self._lock:
                    if self._is_withdrawn():  # after the beat, so that a peer that sees this also sees the beat
                        self._announce(0)
                if self._watched.adopt_failure():
                    return
                silent = self._silent_peer()
            except dist.DistError:
                silent = -1
            except ForgedValue as error:
                self._watched.fail(str(error))
                return
            if silent is not None:
                if not self._stop.is_set():
                    self._watched.lost(silent)
                return
            self._stop.wait(self._every_s)
            now = time.monotonic()
            self._looked_s += min(now - last, BEATS_ASIDE * self._every_s)  # if it was paused for longer, that is lost
            last = now

    def _silent_peer(self) -> int | None:
        """A peer whose beat has stopped for too long, or None."""
        keys = [f"beat/{peer}" for peer in self._peers]
        now = self._looked_s
        if not self._store.check(keys):  # multi_get would block
            missing = [peer for peer, key in zip(self._peers, keys, strict=True) if not self._store.check([key])]
            return next((peer for peer in missing if now > self._patience_with(peer)), None)
        for peer, key, said in zip(self._peers, keys, self._store.get_all(keys), strict=True):
            beat = self._store.parsed(key, said, int)
            before = self._seen.get(peer)
            if before is None or beat > before[0]:  # an old value written back is no sign of life
                self._seen[peer] = (beat, now)
            elif now - before[1] > self._patience_s and now - before[1] > self._patience_with(peer):
                again = self._store.parsed(key, self._store.get(key), int)
                if again <= before[0]:  # else the peer has withdrawn its silence meanwhile
                    return peer
        return None

    def _patience_with(self, peer: int) -> float:
        key = f"silence/{peer}"
        if not self._store.check([key]):
            return self._patience_s
        return self._patience_s + self._store.parsed(key, self._store.get(key), float)
