"""The private folder of a run on one machine, in the system's temporary folder: only this user can open it.

It holds the run's sockets and, if this is the only machine, its rendezvous store.

A killed server cannot remove its folder. So each server holds a lock on its folder, which ends with the process, and
the next server that starts removes folders whose lock is free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ubatch import ConfigError

_PREFIX = "ubatch-run-"
_LOCK = "lock"
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
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
            with suppress(FileNotFoundError), (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
