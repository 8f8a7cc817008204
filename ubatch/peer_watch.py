"""Looks out for failed peers where no thread of the step waits on the host: NCCL's transfers.

With gloo the lane that waits for a transfer looks into the store. With NCCL nobody waits: the host queues on, and sits
at last in a device synchronisation that a dead peer would never let end. So one thread per connection watches:

    every `_BEAT_S`     count up beat/R, this rank's own key
                        somebody posted a failure               -> break the connection, abort the communicator
                        a peer's beat has not changed within the time-out   -> it died; the same

An aborted communicator lets its kernels end, so the host comes back, with rubbish; the end of the step, or the next
launch, then raises `GroupBroken`, which names the cause. Torch's own watchdog ends the *process* instead; its time-out
is longer, so it only comes in when nobody failed and a collective still hangs.

Not yet run on several GPUs: tests drive it over gloo, with a communicator that counts its aborts.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch.distributed as dist

__all__ = ["PeerWatch", "weak_call"]

_BEAT_S = 1.0


class PeerWatch:
    """A thread that keeps looking until the connection is broken, stopped or gone.

    Args:
        rank: this process's global rank.
        ranks: all of them.
        store: where beats are counted.
        patience_s: how long a peer's beat may stand still.
        failed: looks for a reported failure, and acts on it; True if there was one.
        lost: what to do about a rank whose beat stands still, -1 if the store itself is gone. Neither may hold the
            connection.
        beat_s: seconds between two beats.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        store: dist.Store,
        patience_s: float,
        *,
        failed: Callable[[], object],
        lost: Callable[[int], object],
        beat_s: float = _BEAT_S,
    ) -> None:
        self._own, self._store = f"beat/{rank}", store
        self._peers = [each for each in ranks if each != rank]
        self._patience_s, self._beat_s = patience_s, beat_s
        self._failed, self._lost = failed, lost
        self._stop = threading.Event()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._thread = threading.Thread(target=self._look, name="ubatch-peer-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; returns at once."""
        self._stop.set()

    def _look(self) -> None:
        begun = time.monotonic()
        while not self._stop.is_set():
            try:
                self._store.add(self._own, 1)
                if self._failed():
                    return
                silent = self._silent_peer(begun)
            except dist.DistError:
                silent = -1
            if silent is not None:
                if not self._stop.is_set():
                    self._lost(silent)
                return
            self._stop.wait(self._beat_s)

    def _silent_peer(self, begun: float) -> int | None:
        """A peer whose beat has stood still for too long, if there is one."""
        keys = [f"beat/{peer}" for peer in self._peers]
        now = time.monotonic()
        if not self._store.check(keys):  # multi_get would block
            missing = [peer for peer, key in zip(self._peers, keys, strict=True) if not self._store.check([key])]
            return missing[0] if missing and now - begun > self._patience_s else None
        for peer, beat in zip(self._peers, self._store.multi_get(keys), strict=True):
            before = self._seen.get(peer)
            if before is None or before[0] != beat:
                self._seen[peer] = (beat, now)
            elif now - before[1] > self._patience_s:
                return peer
        return None


def weak_call(method: Callable[..., object]) -> Callable[..., object]:
    """`method`, without keeping its object alive; None once that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: object) -> object:
        bound = reference()
        return None if bound is None else bound(*args)

    return call
