"""Writes the experts' load to a file (`--expert-load-out`): now and then while engines run, and at their end."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from moe.balance import Ints, LoadWindows, check_load_suffix, write_loads
from serving.logs import log_event
from ubatch import ConfigError

_logger = logging.getLogger(__name__)

EVERY_S = 30.0
"""Seconds between two writes, while steps run. Each has the whole file, some megabytes of a large model."""
KEEP = 10
"""Windows whose parts the file has."""


def check_load_out(path: Path) -> None:
    """Check that loads can be written to a file, as far as can be said before.

    Raises:
        ConfigError: its name has another ending, or its folder is not there or cannot be written to.
    """
    check_load_suffix(path)
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(f"{path}: there is no folder {folder}. Make it.")
    if path.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{path}: it is a folder, or {folder} cannot be written to. Name another file.")


class LoadFile:
    """Writes windows of loads to a file.

    Args:
        path: the file; replaced if it exists.
        windows: their history is written.
    """

    def __init__(self, path: Path, windows: LoadWindows) -> None:
        self._path, self._windows = path, windows
        self._changed = False
        self._written_at = time.monotonic()
        self._over = asyncio.Event()

    def changed(self) -> None:
        """The windows have more."""
        self._changed = True

    def tick(self) -> None:
        """Write if it is time. For an engine without an event loop."""
        if time.monotonic() - self._written_at >= EVERY_S:
            self.write()

    async def keep(self) -> None:
        """Write, in a thread, whenever it is time, and last after `end`."""
        while not self._over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), EVERY_S)
            if self._changed:
                self._changed = False
                await asyncio.to_thread(self._write, self._windows.history())

    def end(self) -> None:
        """No more loads come; `keep` ends."""
        self._over.set()

    def write(self) -> None:
        """Write if something has changed. A file that cannot be written is logged."""
        if self._changed:
            self._changed = False
            self._write(self._windows.history())

    def _write(self, loads: Ints) -> None:
        self._written_at = time.monotonic()
        try:
            write_loads(self._path, loads)
        except OSError as error:
            what = "the experts' load cannot be written"
            log_event(_logger, what, level=logging.ERROR, path=self._path, error=error.strerror)
