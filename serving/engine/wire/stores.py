"""The private folder of a run on one machine, and the stores: one in that folder; what torch keeps in one that listens.

A `RunFolder` lies in the system's temporary folder; only this user can open it. It holds the run's sockets and, if this
is the only machine, its rendezvous store. A killed server cannot remove its folder. So each server holds a lock on its
folder, which ends with the process, and the next server that starts removes folders whose lock is free.

A `FolderStore` has a file for each value. Nothing listens on a port. Every write replaces a file as a whole, under a
lock that ends with the process that holds it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import torch.distributed as dist

from ubatch import ConfigError
from ubatch.process.job_store import JobStore

_LOOK_S = 0.005
_LOCK, _NEW = ".lock", ".new"
_LONGEST = 200
"""Longest name of a file, without its ending; names of groups list all their ranks, and systems allow 255 bytes."""
_PREFIX = "ubatch-run-"
_OWNERS_LOCK = "lock"
_YOUNG_S = 10.0
"""A folder without a lock that is younger than this may still be under construction."""
_LONGEST_SOCKET = "turns-9999"
"""Longest name of a socket in the folder."""
_MOST_BYTES = 107
"""Longest path of a socket, in bytes: a limit of Linux."""


class RunFolder:
    """A new folder. Folders of dead servers are removed first.

    Raises:
        ConfigError: the temporary folder cannot be written, or its path is too long for sockets.
    """

    def __init__(self) -> None:
        try:
            _remove_left()
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        except OSError as error:
            raise ConfigError(
                f"no folder can be made for temporary files ({error.strerror}). Set TMPDIR to one that this user may "
                f"write."
            ) from error
        spare = _MOST_BYTES - len(os.fsencode(self.path / _LONGEST_SOCKET))
        if spare < 0:
            self.path.rmdir()
            raise ConfigError(
                f"the path of the temporary folder, {self.path.parent}, is {-spare} bytes too long for a socket in it. "
                f"Set TMPDIR to a shorter one."
            )
        self._lock = os.open(self.path / _OWNERS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        _open.add(self)

    def remove(self) -> None:
        """Remove the folder and its contents."""
        if self in _open:
            _open.remove(self)
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)

    @staticmethod
    def remove_all() -> None:
        """Remove all folders of this process, before it ends without other clean-up."""
        for folder in list(_open):
            folder.remove()


_open: set[RunFolder] = set()


def _remove_left() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # its server lives, or another server removes it at the same time
            if folder.lstat().st_uid != os.geteuid():
                continue  # root could open it, but whoever made it chose what its lock leads to
            if time.time() - folder.stat().st_mtime <= _YOUNG_S:
                continue
            with suppress(FileNotFoundError), (folder / _OWNERS_LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


class FolderStore:
    """Values by name, as `ubatch.process.job_store.Values` has them.

    Args:
        folder: of this store alone; made if it does not exist, readable by this user only.
        timeout: how long `get` waits for a value.
    """

    def __init__(self, folder: Path, timeout: timedelta) -> None:
        self.folder, self._timeout = folder, timeout
        folder.mkdir(mode=0o700, exist_ok=True)

    def part(self, name: str) -> FolderStore:
        """A store in a folder next to the values of this one."""
        return FolderStore(self.folder / f"{_file(name)}.part", self._timeout)

    def torch_store(self, name: str) -> dist.Store:
        """A store for what torch keeps of a group of processes: a file that only grows, but little."""
        return dist.FileStore(str(self.folder / f"{_file(name)}.torch"))

    def set(self, name: str, value: str) -> None:
        """Write a value."""
        with self._locked():
            self._write(name, value)

    def get(self, name: str) -> bytes:
        """Read a value; waits until there is one."""
        _await(lambda: self.check([name]), [name], self._timeout)
        return self._read(name) or b""

    def multi_get(self, names: Sequence[str]) -> list[bytes]:
        """Like `get`, for several names."""
        return [self.get(name) for name in names]

    def check(self, names: Sequence[str]) -> bool:
        """Whether all of these names have a value."""
        return all(self._read(name) is not None for name in names)

    def compare_set(self, name: str, expected: str, wanted: str) -> bytes:
        """Write `wanted` if the value is `expected`, or if there is none and `expected` is empty. Returns the value
        after that."""
        with self._locked():
            before = self._read(name) or b""
            if before.decode(errors="replace") != expected:
                return before
            self._write(name, wanted)
            return wanted.encode()

    def add(self, name: str, amount: int) -> int:
        """Add to a counter; returns its new value."""
        with self._locked():
            total = int(self._read(name) or 0) + amount
            self._write(name, str(total))
            return total

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with (self.folder / _LOCK).open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise self._gone(error) from error

    def _read(self, name: str) -> bytes | None:
        try:
            return (self.folder / _file(name)).read_bytes()
        except FileNotFoundError as error:
            if self.folder.exists():
                return None
            raise self._gone(error) from error

    def _write(self, name: str, value: str) -> None:
        """Write a value, under the lock."""
        (self.folder / _NEW).write_text(value)
        os.replace(self.folder / _NEW, self.folder / _file(name))

    def _gone(self, error: OSError) -> dist.DistStoreError:
        return dist.DistStoreError(f"the store {self.folder} cannot be used ({error.strerror}).")


def _file(name: str) -> str:
    quoted = quote(name, safe="")
    return quoted if len(quoted) <= _LONGEST else hashlib.sha256(name.encode()).hexdigest()


def _await(there: Callable[[], bool], names: Sequence[str], timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    while not there():
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"nobody has written {', '.join(names)} within {timeout}.")
        time.sleep(_LOOK_S)


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
        _await(lambda: self.check(keys), keys, timeout or self._timeout)
