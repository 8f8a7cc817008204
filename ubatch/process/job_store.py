"""What ranks tell each other in the job's rendezvous store, with a keyed hash where the job has a key.

The store has no users and no passwords: whoever reaches its port can write. With a key, which only the job's processes
know (`sign_job_store`), what they read there is what one of them wrote, under the same name:

    without a key    value
    with one         "hmac-sha256:" 64 hexadecimal digits ":" value       of the key's hash over name, 0, value

Give every job another key, derived from a lasting one: else what an earlier job said counts in this one. Out of reach
is who puts back what was said earlier in this job under the same name, or removes it; and counters (`add`), which the
store itself computes. They carry no text, and nothing is read from them but whether there is something to look at.
What torch, gloo and NCCL keep in the store for themselves is theirs, and unsigned.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ubatch.errors import ForgedValue

__all__ = ["JobStore", "job_store", "sign_job_store"]

_T = TypeVar("_T")
_MARK = "hmac-sha256:"


class JobStore:
    """Text by name. Errors of the store itself pass through (`dist.DistError`).

    Args:
        store: where it is kept.
        key: of the hashes; None for values without.
        path: before all names, with a slash at its end.
    """

    def __init__(self, store: dist.Store, key: bytes | None = None, path: str = "") -> None:
        self._store, self._key, self._path = store, key, path

    def part(self, name: str) -> JobStore:
        """The names that begin with `name` and a slash."""
        return JobStore(self._store, self._key, f"{self._path}{name}/")

    def set(self, name: str, value: str) -> None:
        """Say something."""
        self._store.set(self._path + name, self._signed(name, value))

    def get(self, name: str) -> str:
        """What was said; waits until something is.

        Raises:
            ForgedValue: its hash is none of this job, or there is none.
        """
        return self._verified(name, self._store.get(self._path + name))

    def parsed(self, name: str, value: str, parse: Callable[[str], _T]) -> _T:
        """What `parse` makes of a value.

        Args:
            name: where it stands.
            value: what `get` or another gave.
            parse: raises ValueError for what no rank says.

        Raises:
            ForgedValue: it cannot be parsed. Without a key, that is all that a forgery shows.
        """
        try:
            return parse(value)
        except ValueError as error:
            raise ForgedValue(self._path + name, f"is {value[:80]!r}, which no rank says") from error

    def get_all(self, names: Sequence[str]) -> list[str]:
        """As `get`, of several at once."""
        values = self._store.multi_get([self._path + name for name in names])
        return [self._verified(name, value) for name, value in zip(names, values, strict=True)]

    def check(self, names: Sequence[str]) -> bool:
        """Whether all of them were said."""
        return self._store.check([self._path + name for name in names])

    def compare_set(self, name: str, expected: str, wanted: str) -> str:
        """Say `wanted` if `expected` stands there, or, where that is empty, if nothing does; returns what stands there
        now. Errors as of `get`."""
        before = self._signed(name, expected) if expected else ""
        return self._verified(name, self._store.compare_set(self._path + name, before, self._signed(name, wanted)))

    def add(self, name: str, amount: int) -> int:
        """Change a counter, which nothing signs; returns what it is now."""
        return self._store.add(self._path + name, amount)

    def _signed(self, name: str, value: str) -> str:
        return value if self._key is None else f"{_MARK}{self._hash(self._key, name, value)}:{value}"

    def _verified(self, name: str, stored: bytes) -> str:
        text = stored.decode(errors="replace")  # where that loses something, the hash no longer fits
        signed = text.startswith(_MARK)
        if self._key is None:
            if signed:
                raise ForgedValue(self._path + name, "carries a keyed hash, and this process has no key to check it")
            return text
        if not signed:
            raise ForgedValue(self._path + name, "carries no keyed hash")
        claimed, _, value = text.removeprefix(_MARK).partition(":")
        if not hmac.compare_digest(claimed.encode(), self._hash(self._key, name, value).encode()):
            raise ForgedValue(self._path + name, "carries a keyed hash of another key, name or value")
        return value

    def _hash(self, key: bytes, name: str, value: str) -> str:
        return hmac.new(key, f"{self._path}{name}\0{value}".encode(), hashlib.sha256).hexdigest()


_key: bytes | None = None


def sign_job_store(key: bytes | None) -> None:
    """Sign what this process says in the job's store from now on, and believe only what is signed so.

    Every rank must call it, with the same key, before the first `CommGroup` is made.

    Args:
        key: at least 32 random bytes that this job alone has; None signs nothing.
    """
    global _key
    _key = key


def job_store() -> JobStore:
    """That of torch.distributed's default group."""
    return JobStore(c10d._get_default_store(), _key)
