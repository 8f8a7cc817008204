"""Standard streams that are closed, that are full, or that nobody reads.

closed             /dev/null takes the number, or the next file or socket would get it, and with it what others write
stderr cannot be   messages are lost; the command goes on, and its status does not change
stdout cannot be   `StdoutLost` is raised where something is written, as a command without its output has failed
"""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import TextIO


class StdoutLost(OSError):
    """Standard output cannot be written.

    Attributes:
        unread: its reader has left, as in `ubatch serve --help | head -1`.
    """

    @property
    def unread(self) -> bool:
        return self.errno == errno.EPIPE

    def __str__(self) -> str:
        if self.errno == errno.EBADF:
            return "standard output is closed; send it to a file, or to /dev/null."
        return f"cannot write to standard output: {self.strerror}. Make room there, or send it elsewhere."


def open_standard_streams() -> None:
    """Make `sys.stdout` and `sys.stderr` usable, whatever they are. Streams that are not the process's own stay."""
    _take_closed_numbers()
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Stdout(1, "w", closefd=False), sys.__stdout__)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Stderr(2, "w", closefd=False), sys.__stderr__)


def give_up_stdout() -> None:
    """Lose what is still buffered for standard output, or the interpreter complains when it ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _take_closed_numbers() -> None:
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # Output opened for reading: to write there fails, as it would have. Messages may be lost.
            # `open` gives the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY), True)


def _text(raw: io.RawIOBase, like: TextIO | None) -> TextIO:
    """A text stream over `raw`, with the settings of the stream that it replaces."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=None if like is None else like.encoding,
        errors="backslashreplace" if like is None else like.errors,
        line_buffering=raw.isatty() or isinstance(raw, _Stderr),
    )


class _Stdout(io.FileIO):
    def write(self, data: object, /) -> int:
        try:
            written = super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            raise StdoutLost(error.errno, error.strerror) from error
        if written is None:  # somebody made it non-blocking, and nobody reads
            raise StdoutLost(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return written


class _Stderr(io.FileIO):
    def write(self, data: object, /) -> int:
        with suppress(OSError):
            super().write(data)  # type: ignore[arg-type]
        return memoryview(data).nbytes  # type: ignore[arg-type]
