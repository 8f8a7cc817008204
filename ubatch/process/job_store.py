"""Messages between ranks in the job's rendezvous store, with a keyed hash if the job has a key.

The store has no users and no passwords: anyone who reaches its port can write. With a key that only the job's processes
know (`use_job_store`), a value that they read was written by one of them under the same name:

    without a key    value
    with one         "hmac-sha256:" 64 hexadecimal digits ":" value       HMAC over name, a zero byte, value

Give every job its own key, derived from a lasting one; otherwise values of an earlier job are valid in this one. The
hash does not protect against replaying or removing earlier values of the same job. What torch, gloo and NCCL
keep in the store is not written here.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch.distributed import distributed_c10d as c10d

from ubatch.errors import ForgedValue

_T = TypeVar("_T")
_MARK = "hmac-sha256:"


class Values(Protocol):
    """What is needed of a store; `torch.distributed.Store` has it. Its errors are `torch.distributed.DistError`."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value; waits until there is one."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Like `get`, for several names."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all have a value."""

    def compare_set(self, key: str, expected: str, wanted: str, /) -> bytes:
        """Write `wanted` where `expected` is, or nothing if that is empty; returns the value after that."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter; returns its new value."""


class JobStore:
    """Text values by name. Errors of the store itself pass through (`dist.DistError`).

    Args:
        key: for the hashes; None writes values without a hash.
        path: prefix of all names, ending with a slash.
    """

    def __init__(self, store: Values, key: bytes | None = None, path: str = "") -> None:
        self._store, self._key, self._path = store, key, path

    def part(self, name: str) -> JobStore:
        """A store for the names that begin with `name` and a slash."""
        return JobStore(self._store, self._key, f"{self._path}{name}/")

    def set(self, name: str, value: str) -> None:
        """Write a value."""
        self._store.set(self._path + name, self._signed(name, value))

    def get(self, name: str) -> str:
        """Read a value; waits until there is one.

        Raises:
            ForgedValue: its hash is missing or does not match this job's key.
        """
        return self._verified(name, self._store.get(self._path + name))

    def parsed(self, name: str, value: str, parse: Callable[[str], _T]) -> _T:
        """Parse a value.

        Args:
            value: its text, as read by `get`.
            parse: converts the text; raises ValueError for text that no rank writes.

        Raises:
            ForgedValue: it cannot be parsed. Without a key this is the only check for forged values.
        """
        try:
            return parse(value)
        except ValueError as error:
            raise ForgedValue(self._path + name, f"is {value[:80]!r}, which no rank says") from error

    def get_all(self, names: Sequence[str]) -> list[str]:
        """Like `get`, for several names at once."""
        values = self._store.multi_get([self._path + name for name in names])
        return [self._verified(name, value) for name, value in zip(names, values, strict=True)]

    def check(self, names: Sequence[str]) -> bool:
        """Whether all of these names have a value."""
        return self._store.check([self._path + name for name in names])

    def compare_set(self, name: str, expected: str, wanted: str) -> str:
        """Write `wanted` if the value is `expected`, or if there is no value and `expected` is empty. Returns the value
        after that. Errors as in `get`."""
        before = self._signed(name, expected) if expected else ""
        return self._verified(name, self._store.compare_set(self._path + name, before, self._signed(name, wanted)))

    def add(self, name: str, amount: int) -> int:
        """Add to a counter; returns its new value. Errors as in `get`."""
        if self._key is None:
            return self._store.add(self._path + name, amount)
        mine, seen = secrets.token_hex(8), ""  # the store cannot sign; so a sum is a value that names who wrote it
        while True:
            total = self.parsed(name, seen.partition(" ")[0] or "0", int) + amount
            if seen and not amount:  # peers that wait ask for it all the time: they must not contend to write it
                return total
            now = self.compare_set(name, seen, f"{total} {mine}")
            if now == f"{total} {mine}":
                return total
            seen = now

    def _signed(self, name: str, value: str) -> str:
        return value if self._key is None else f"{_MARK}{self._hash(self._key, name, value)}:{value}"

    def _verified(self, name: str, stored: bytes) -> str:
        text = stored.decode(errors="replace")  # if this loses bytes, the hash no longer matches
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
_values: Values | None = None


def use_job_store(key: bytes | None, values: Values | None = None) -> None:
    """Sign all values that this process writes to the job's store from now on, and accept only values so signed.

    Every rank must call it, with the same key and store, before the first `CommGroup` is made.

    Args:
        key: at least 32 random bytes, used by this job only; None signs nothing.
        values: the job's store; that of torch.distributed's default group by default.
    """
    global _key, _values
    _key, _values = key, values


def job_store() -> JobStore:
    """The job's store."""
    return JobStore(c10d._get_default_store() if _values is None else _values, _key)
