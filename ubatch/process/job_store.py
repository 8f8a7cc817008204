"""Messages between ranks in the job's rendezvous store, with a keyed hash if the job has a key.

The store has no users and no passwords: anyone who reaches its port can write. With a key that only the job's processes
know (`use_job_store`), a value that they read was written by one of them under the same name:

    without a key    value
    with one         "hmac-sha256:" 64 hexadecimal digits ":" value       HMAC over name, a zero byte, value

Give every job its own key, derived from a lasting one; otherwise values of an earlier job are valid in this one. The
hash does not protect against replaying or removing earlier values of the same job. What torch, gloo and NCCL
keep in the store is not written here.

A rank that compiles, tunes or loads tells its peers there, which then wait for it longer than `timeout_s` (`late`,
`Patience`). Ranks do not compile equally fast: one may find in a cache what another must compile. Every waiting rank
reads:

    ubatch/late        number of ranks that are late now; while it is 0, nothing else is read
    ubatch/late/R      "number what": rank R is late, for the number-th time; "" when it is no longer late

Time in which a peer is late does not count towards a time-out, up to `LATE_S` at a time. After that the rank counts as
hung.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ubatch.errors import ForgedValue
from ubatch.process.interrupts import Marks

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
