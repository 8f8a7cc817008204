"""What a rank leaves behind for the process that takes its place: memory that outlives processes.

A `SharedMemory` has no name in any file system; where the system is not Linux, it is a temporary file without one. It
lives as long as one process has it open, so a killed server leaves nothing behind. The process that starts the ranks
makes it and keeps it; ranks get it as an argument.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from dataclasses import dataclass, field
from multiprocessing import reduction
from typing import Any


class SharedMemory:
    """A file in memory. It can be passed to a process that is started; there it is the same memory."""

    def __init__(self, name: str) -> None:
        if sys.platform == "linux":
            self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.fd),)

    @property
    def size(self) -> int:
        """Bytes; 0 at first."""
        return os.fstat(self.fd).st_size

    def map(self, size: int | None = None) -> mmap.mmap:
        """The memory, to read and write.

        Args:
            size: make it as large as this before.
        """
        if size is not None:
            os.ftruncate(self.fd, size)
        return mmap.mmap(self.fd, self.size)

    def close(self) -> None:
        """Close it here."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _received(fd: Any) -> SharedMemory:
    memory = SharedMemory.__new__(SharedMemory)
    memory.fd = fd.detach()
    return memory


@dataclass(frozen=True)
class KeptOfRank:
    """What is kept of one rank, from one of its processes to the next.

    Attributes:
        weights: prepared weights, and what was measured for them.
        steps: which requests are in the steps that run.
    """

    weights: SharedMemory = field(default_factory=lambda: SharedMemory("ubatch-weights"))
    steps: SharedMemory = field(default_factory=lambda: SharedMemory("ubatch-steps"))

    def close(self) -> None:
        """Close the memory here."""
        self.weights.close()
        self.steps.close()
