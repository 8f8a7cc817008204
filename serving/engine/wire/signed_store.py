"""What torch keeps in a store that listens, signed: gloo's ranks read their peers' addresses there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ubatch.process.job_store import JobStore

__all__ = ["SignedStore"]

_LOOK_S = 0.005


class SignedStore(dist.Store):
    """A store for gloo whose values carry a keyed hash. torch keeps no reference to this object: its user must.

    Args:
        values: where they are kept.
        timeout: how long `wait` waits, unless it is told.
    """

    def __init__(self, values: JobStore, timeout: timedelta) -> None:
        super().__init__()
        self._values, self._timeout = values, timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._values.set(key, value if isinstance(value, str) else bytes(value).decode("latin-1"))

    def get(self, key: str) -> bytes:
        """Read a value; waits until there is one. Raises ForgedValue if its hash is missing or wrong."""
        return self._values.get(key).encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its new value."""
        return self._values.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all have a value."""
        return self._values.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all have a value."""
        patience = timeout or self._timeout
        deadline = time.monotonic() + patience.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"nobody has written {', '.join(keys)} within {patience}.")
            time.sleep(_LOOK_S)
